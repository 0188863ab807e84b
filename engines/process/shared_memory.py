"""Segments of shared memory that SGLang leaves behind when it is killed, which is also how it ends its own workers.

Standard library alone, as the guard is.
"""

import contextlib
import os
import time
from pathlib import Path

_SEGMENTS = ("sglang_loads_", "sgl_shm_", "multi_tokenizer_args_")
_MAPPED_WITHIN_S = 1.0
"""An engine maps a segment that it has made within this time."""


def remove_left_segments(place: Path = Path("/dev/shm")) -> list[Path]:
    """Remove our user's segments that no process maps; return them."""
    made_before = time.time() - _MAPPED_WITHIN_S
    left = [path for path in place.glob("*") if path.name.startswith(_SEGMENTS) and _is_ours(path, made_before)]
    mapped = _mapped() if left else set()
    removed = [path for path in left if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


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
