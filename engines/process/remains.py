"""What engines leave behind when they are killed: their temporary files, and SGLang's segments of shared memory.

Standard library alone, as the guard is.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_NAME = "rollout-gateway-engine-"
# The path of a socket has at most 107 bytes. vLLM's have a UUID in the folder.
_MOST_BYTES = 107 - len(f"/{_NAME}12345678/") - 36
_SEGMENTS = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
_MAPPED_WITHIN_S = 1.0
"""An engine maps a segment that it has made within this time."""


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
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{outer}/torchinductor_{os.getuid()}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def remove_left_folders(place: Path | None = None) -> list[Path]:
    """Remove our user's folders whose engines were killed together with their guards; return them."""
    place = place or _place(tempfile.gettempdir())
    return [path for path in place.glob(f"{_NAME}*") if _is_removed(path)]


def remove_left_segments(place: Path = Path("/dev/shm")) -> list[Path]:
    """Remove our user's segments that no process maps; return them. SGLang ends its own workers by killing them."""
    made_before = time.time() - _MAPPED_WITHIN_S
    left = [path for path in place.glob("*") if path.name.startswith(_SEGMENTS) and _is_ours(path, made_before)]
    mapped = _mapped() if left else set()
    removed = [path for path in left if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _place(outer: str) -> Path:
    """Return the temporary folder of this process, or another where the path of a socket in it would be too long."""
    return Path(outer if len(os.fsencode(outer)) <= _MOST_BYTES else "/tmp")


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


def _is_ours(segment: Path, made_before: float) -> bool:
    with contextlib.suppress(OSError):  # removed in this moment
        status = segment.stat()
        return status.st_uid == os.getuid() and status.st_ctime < made_before
    return False


def _mapped() -> set[str]:
    """List the files that processes of our user map."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            found |= {line.split(maxsplit=5)[-1] for line in maps.read_text(errors="replace").splitlines()}
    return found
