"""Where each token's name begins in all names of a sample, over all its chunks.

Each chunk counts from its own start, from the text before or from the names before, by the kind and version of its
engine. Where all count from the names before, they are passed on as they were written, which costs a fifth of counting.
"""

from itertools import accumulate

import msgspec
from msgspec import Raw

from gateway.dialects.replies.carried import encoded, list_of

_EMPTY = b"[]"

_names = msgspec.json.Decoder(list[str]).decode
_name = msgspec.json.Decoder(str).decode


class Offsets:
    """The offsets of one sample."""

    def __init__(self) -> None:
        self._written: bytearray | None = bytearray()  # each after a comma; None where they are counted
        self._end = 0

    def add(self, offsets: Raw, names: Raw) -> None:
        """Take those of a chunk, and the names of its tokens."""
        if self._written is None:
            return
        written = bytes(offsets)
        if written == _EMPTY == bytes(names):
            return
        try:
            begin, end = _extent(written, bytes(names))
        except ValueError:
            begin, end = -1, 0
        if begin != self._end:
            self._written = None
            return
        self._written += b","
        self._written += written[1:-1]
        self._end = end

    def joined(self, names: bytearray) -> Raw:
        """Return the offsets of all names, which are JSON, each after a comma."""
        if self._written:
            return list_of(self._written)
        lengths = map(len, _names(b"[" + names[1:] + b"]")[:-1])
        return Raw(encoded(list(accumulate(lengths, initial=0)) if names else []))


def _extent(offsets: bytes, names: bytes) -> tuple[int, int]:
    """Return where the first name of a chunk begins and the last one ends. Raise `ValueError` where a look at both ends
    does not say it."""
    quote = names.rfind(b'","') + 2  # of the last name
    if names[quote - 3 : quote - 2] == b"\\":
        raise ValueError("the last name may have begun before")
    last = offsets[max(offsets.rfind(b","), 0) + 1 : -1]
    return int(offsets[1 : offsets.find(b",")]), int(last) + len(_name(names[quote:-1]))
