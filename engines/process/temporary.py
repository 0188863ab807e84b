"""A folder for the temporary files of one engine, such as the sockets of vLLM and SGLang, which they leave when killed.

Standard library alone, as the guard is.
"""

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from pathlib import Path

_NAME = "rollout-gateway-engine-"
# The path of a socket has at most 107 bytes. vLLM's have a UUID in the folder.
_MOST_BYTES = 107 - len(f"/{_NAME}12345678/") - 36
_EVERYWHERE = Path("/tmp")


class EngineFolder:
    """A new folder, which is TMPDIR of this process and of those that it starts. This process locks it while it lives,
    and so does a fork of it."""

    def __init__(self) -> None:
        outer = tempfile.gettempdir()
        locked = None
        while locked is None:
            self.path = Path(tempfile.mkdtemp(prefix=_NAME, dir=_place(outer)))
            locked = _locked(self.path)
        self._lock = locked
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.path)
        # torch keeps compiled kernels in the temporary folder; the next start is to find them.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outer}/torchinductor_{_user()}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def remove_left_folders(place: Path | None = None) -> list[Path]:
    """Remove our user's folders whose engines were killed together with their guards; return them."""
    place = place or _place(tempfile.gettempdir())
    return [path for path in place.glob(f"{_NAME}*") if _is_removed(path)]


def _place(outer: str) -> Path:
    """Return the temporary folder of this process, or another where the path of a socket in it would be too long."""
    return Path(outer) if len(os.fsencode(outer)) <= _MOST_BYTES else _EVERYWHERE


def _locked(path: Path) -> int | None:
    """Lock a new folder. None where `remove_left_folders` of another process has removed it before."""
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # else it was removed while this waited for the lock
            return lock
        os.close(lock)
    return None


def _is_removed(path: Path) -> bool:
    """Remove a folder of our user that nobody locks. It is locked meanwhile, so that its maker notices."""
    with contextlib.suppress(OSError):  # removed in this moment, or locked
        if path.lstat().st_uid != os.getuid() or path.is_symlink():
            return False
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
        return True
    return False


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
