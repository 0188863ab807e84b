"""Makes an environment what requirements/ says, from nothing or an older state; does nothing when it is already that.

`setup.py [NAME]` with a name of `ENVIRONMENTS`. Standard library alone, and plain enough for an old Python to reach the
message that says which one is needed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH = REQUIREMENTS / "torch-cpu.txt"
UV = REQUIREMENTS / "uv.txt"


class Environment(NamedTuple):
    """A virtual environment in `folder`: PyTorch's CPU build if `holds_torch`, what `lock` pins, and our packages if
    `holds_project`."""

    folder: Path
    lock: Path
    holds_project: bool
    holds_torch: bool = True

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / ".rollout-gateway-setup"

    @property
    def inputs(self) -> list[Path]:
        project = [ROOT / "pyproject.toml"] if self.holds_project else []
        return [*project, Path(__file__), TORCH, UV, self.lock]


# Engines of different environments serve in one fleet: vLLM and SGLang pin different versions of what both need.
ENVIRONMENTS = {
    "project": Environment(ROOT / ".venv", REQUIREMENTS / "cpu.txt", holds_project=True),
    "sglang": Environment(ROOT / ".venv-sglang", REQUIREMENTS / "sglang.txt", holds_project=False),
    "verl": Environment(ROOT / ".venv-verl", REQUIREMENTS / "verl.txt", holds_project=True),
    "site": Environment(ROOT / ".venv-site", REQUIREMENTS / "site.txt", holds_project=False, holds_torch=False),
}

NO_TORCH = """
setup: pip found no torch 2.13.0+cpu that matches requirements/torch-cpu.txt (Python 3.11 to 3.13, Linux on x86-64).
PyTorch publishes its CPU builds on an index of its own. Name it to pip and run make again:

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

or put the wheel into a folder and name that: PIP_FIND_LINKS=/path/of/folder make setup"""


def main() -> None:
    environment = ENVIRONMENTS[sys.argv[1] if len(sys.argv) > 1 else "project"]
    digest = _digest(environment)
    if environment.stamp.exists() and environment.stamp.read_text() == digest:
        return
    _check_machine()
    if not environment.python.exists():
        _say("making " + environment.folder.name)
        _run(sys.executable, "-m", "venv", str(environment.folder))
    environment.stamp.unlink(missing_ok=True)
    if environment.holds_torch:
        _install_torch(environment)
    _install_lock(environment)
    if environment.holds_project:
        _run(*_pip(environment, "--no-deps", "--no-build-isolation", "-e", str(ROOT)))
    environment.stamp.write_text(digest)
    _say("done")


def _digest(environment: Environment) -> str:
    state = hashlib.sha256(str(ROOT).encode())
    for path in environment.inputs:
        state.update(path.read_bytes())
    return state.hexdigest()


def _check_machine() -> None:
    remedy = "on Debian 12 or newer: apt-get install python3 python3-venv git make"
    if sys.version_info < (3, 11):  # noqa: UP036  # run by whatever python3 the machine has
        _fail("needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; " + remedy)
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        _fail("this Python comes without venv; " + remedy)


def _install_torch(environment: Environment) -> None:
    """By pip, because pip is what machines with a local copy or index of PyTorch have configured."""
    _say("torch (CPU)")
    if not _try(_pip(environment, "--no-deps", "--require-hashes", "-r", str(TORCH))):
        _fail(NO_TORCH.strip().removeprefix("setup: "))


def _install_lock(environment: Environment) -> None:
    """By uv, which takes a fifth of pip's time; by pip where uv reaches no index."""
    lock = ["--no-deps", "--require-hashes", "-r", str(environment.lock)]
    _say("packages of " + str(environment.lock.relative_to(ROOT)))
    if _try(_pip(environment, "--no-deps", "--require-hashes", "-r", str(UV))):
        python = str(environment.python)
        uv = [python, "-m", "uv", "pip", "install", "-q", "--python", python, "--compile-bytecode", *lock]
        if _try(uv, {**os.environ, **index_for_uv(environment)}):
            return
        _say("uv could not; trying pip")
    _run(*_pip(environment, *lock))


def _pip(environment: Environment, *arguments: str) -> list[str]:
    quiet = ["-q", "--disable-pip-version-check", "--no-input"]
    return [str(environment.python), "-m", "pip", "install", *quiet, *arguments]


def index_for_uv(environment: Environment) -> dict[str, str]:
    """Pip's index configuration in uv's words: uv reads none of it by itself. What UV_* already says stands."""
    settings = {}
    asked = [str(environment.python), "-m", "pip", "config", "list"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False)
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # the environment (:env:) sorts first and must win
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = " ".join(str(ast.literal_eval(value)).split())
    found = {
        "UV_DEFAULT_INDEX": settings.get("index-url", ""),
        "UV_INDEX": settings.get("extra-index-url", ""),
        "UV_INDEX_STRATEGY": "unsafe-best-match" if "extra-index-url" in settings else "",
        "UV_FIND_LINKS": settings.get("find-links", "").replace(" ", ","),
        "SSL_CERT_FILE": settings.get("cert", ""),
    }
    return {name: value for name, value in found.items() if value and name not in os.environ}


def _try(command: list[str], environment: dict[str, str] | None = None) -> bool:
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def _run(*command: str) -> None:
    if not _try(list(command)):
        _fail("this command failed: " + " ".join(command))


def _say(text: str) -> None:
    print("setup: " + text, flush=True)


def _fail(text: str) -> None:
    sys.exit("setup: " + text)


if __name__ == "__main__":
    main()
