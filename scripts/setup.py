"""Makes `.venv` what requirements/ says, from nothing or from an older state; does nothing when it is already that.

Standard library alone, and plain enough for an old Python to reach the message that says which one is needed.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".rollout-gateway-setup"
REQUIREMENTS = ROOT / "requirements"
INPUTS = [ROOT / "pyproject.toml", Path(__file__), *sorted(REQUIREMENTS.glob("*.txt"))]

NO_TORCH = """
setup: pip found no torch 2.13.0+cpu that matches requirements/torch-cpu.txt (Python 3.11 to 3.13, Linux on x86-64).
PyTorch publishes its CPU builds on an index of its own. Name it to pip and run make again:

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

or put the wheel into a folder and name that: PIP_FIND_LINKS=/path/of/folder make setup"""


def main() -> None:
    digest = _digest()
    if STAMP.exists() and STAMP.read_text() == digest:
        return
    _check_machine()
    if not PYTHON.exists():
        _say("making .venv")
        _run(sys.executable, "-m", "venv", str(VENV))
    STAMP.unlink(missing_ok=True)
    _install_torch()
    _install_lock()
    _install_project()
    STAMP.write_text(digest)
    _say("done")


def _digest() -> str:
    state = hashlib.sha256(str(ROOT).encode())
    for path in INPUTS:
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


def _install_torch() -> None:
    """By pip, because pip is what machines with a local copy or index of PyTorch have configured."""
    _say("torch (CPU)")
    if not _try(_pip("--no-deps", "--require-hashes", "-r", str(REQUIREMENTS / "torch-cpu.txt"))):
        _fail(NO_TORCH.strip().removeprefix("setup: "))


def _install_lock() -> None:
    """By uv, which takes a fifth of pip's time; by pip where uv reaches no index."""
    lock = ["--no-deps", "--require-hashes", "-r", str(REQUIREMENTS / "cpu.txt")]
    _say("packages of requirements/cpu.txt")
    if _try(_pip("--no-deps", "--require-hashes", "-r", str(REQUIREMENTS / "uv.txt"))):
        uv = [str(VENV / "bin" / "uv"), "pip", "install", "-q", "--python", str(PYTHON), "--compile-bytecode", *lock]
        if _try(uv, {**os.environ, **index_for_uv()}):
            return
        _say("uv could not; trying pip")
    _run(*_pip(*lock))


def _install_project() -> None:
    _run(*_pip("--no-deps", "--no-build-isolation", "-e", str(ROOT)))


def _pip(*arguments: str) -> list[str]:
    quiet = ["-q", "--disable-pip-version-check", "--no-input"]
    return [str(PYTHON), "-m", "pip", "install", *quiet, *arguments]


def index_for_uv() -> dict[str, str]:
    """Pip's index configuration in uv's words: uv reads none of it by itself. What UV_* already says stands."""
    settings = {}
    listed = subprocess.run([str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
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
