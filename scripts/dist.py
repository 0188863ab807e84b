"""Builds the source archive and, out of that, the wheel, into dist/; then tries the wheel without the checkout.

    python -m scripts.dist

The wheel is installed alone into an environment of its own. There its packages are imported, and its command prints its
version and writes out the examples, of which it finds one valid.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGES = ("engines", "gateway", "sim", "trainer_client", "tuning")
EXAMPLE = "sim.yaml"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    archive = build(ROOT, "sdist")
    with tempfile.TemporaryDirectory(prefix="rollout-gateway-dist-") as folder:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        wheel = build(Path(folder) / archive.name.removesuffix(".tar.gz"), "wheel")
        try_out(wheel, Path(folder) / "stranger")
    for path in (archive, wheel):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")


def build(source: Path, target: str) -> Path:
    """Build "sdist" or "wheel" from the folder into dist/. Return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(DIST)]
    done = subprocess.run(command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"dist: the {target} cannot be built:\n{done.stdout}")
    (found,) = DIST.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return found


def try_out(wheel: Path, folder: Path) -> None:
    """Install the wheel below `folder` and use it there. Raise `CalledProcessError` for what fails."""
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_"))}

    def run(program: str, *arguments: object) -> str:
        words = [str(folder / ".venv" / "bin" / program), *map(str, arguments)]
        done = subprocess.run(words, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    run("python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", wheel)
    run("python", "-c", "import " + ", ".join(PACKAGES))
    version = wheel.name.split("-")[1]
    if run("rollout-gateway", "--version") != f"rollout-gateway {version}\n":
        sys.exit(f"dist: the command of {wheel.name} prints another version than {version}")
    run("rollout-gateway", "example")
    print(run("rollout-gateway", "config", "validate", "-c", f"examples/{EXAMPLE}"), end="")


if __name__ == "__main__":
    main()
