"""Segments of shared memory that SGLang leaves behind when it is killed, which is also how it ends its own workers.

Standard library alone, as the guard is.
"""

import contextlib
import os
import time
from pathlib import Path

_PLACE = Path("/dev/shm")
_NAMES = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
# Another engine maps a segment that it has made within this time.
_MAPPED_WITHIN_S = 1.0


def remove_left_segments(since: float, place: Path = _PLACE) -> list[Path]:
    """Remove our user's segments made after `since` (seconds of the epoch) that no process maps; return them."""
    left = [path for path in place.glob("*") if path.name.startswith(_NAMES) and _is_ours(path, since)]
    if not left:
        return []
    mapped = _mapped()
    removed = [path for path in left if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _is_ours(path: Path, since: float) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False  # removed in this moment
    return status.st_uid == os.getuid() and since <= status.st_ctime < time.time() - _MAPPED_WITHIN_S


def _mapped() -> set[str]:
    """List the files that processes of our user map."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            found |= {line.split(maxsplit=5)[-1] for line in maps.read_text(errors="replace").splitlines()}
    return found
