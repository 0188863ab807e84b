"""Lines of a file that are whole, also where its disk is full."""

import os
from contextlib import suppress


def append_line(file: int, line: bytes) -> None:
    """Append a line at the end of an open file. Raise `OSError`, with nothing of the line there, where it fails."""
    end = os.fstat(file).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]  # a disk takes what fits
    except OSError:
        with suppress(OSError):  # no file on a disk
            os.ftruncate(file, end)
        raise
