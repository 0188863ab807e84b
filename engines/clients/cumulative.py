"""Streams whose events repeat a sample from its start, as SGLang's do.

To decode every event would cost the square of a sample's length.
"""

import re

_SMALL_BYTES = 4096
_GROWTH = 1 / 32
_INDEX = re.compile(rb'"index": ?(\d+)')
_HAS_NO_END = re.compile(rb'"finish_reason": ?null')


class LatestEvents:
    """Picks the events to decode, and holds the latest other event of each sample.

    A small event, one that ends its sample, and one that is 1/32 larger than the last that was decoded are worth it.
    """

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self._held: dict[bytes, bytes] = {}

    def is_due(self, event: bytes) -> bool:
        """Return True if the event is to be decoded; else hold it."""
        sample, size = _sample_of(event), len(event)
        is_large = size > _SMALL_BYTES and size < self._sizes.get(sample, 0) * (1 + _GROWTH)
        if is_large and _HAS_NO_END.search(event):
            self._held[sample] = event
            return False
        self._sizes[sample] = size
        self._held.pop(sample, None)
        return True

    def rest(self) -> list[bytes]:
        """Return the held events, at the end of the stream."""
        return list(self._held.values())


def _sample_of(event: bytes) -> bytes:
    """Return the number of the event's sample, which SGLang writes last; a quote in text is escaped."""
    found = _INDEX.search(event, event.rfind(b'"index":'))
    return found[1] if found else b""
