"""Arrival times of the tokens of a streamed reply, read event by event.

A block may hold many events, and a reader that waits for full blocks sees the first token with the last: read up to the
end of a line only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

Json = dict[str, Any]


@dataclass(slots=True)
class CompletionTimes:
    """One completion: times of its first and last tokens on the reader's clock, and the longest gap."""

    first: float
    last: float
    tokens: int = 0
    first_tokens: int = 0
    longest_gap_s: float = 0.0
    ended: float | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first chunk; None for a single chunk."""
        later = self.tokens - self.first_tokens
        return (self.last - self.first) / later if later > 0 else None


class Timeline:
    """The events of one reply of /v1/completions. Feed it each line with its arrival time."""

    def __init__(self) -> None:
        self.completions: dict[int, CompletionTimes] = {}
        self.usage: Json = {}
        self.is_whole = False
        self.is_streamed = True

    def feed(self, line: bytes, now: float) -> None:
        """Add a line. Raise `ValueError` for a server error or a malformed event."""
        if not (line := line.strip()):
            return
        if not line.startswith(b"data:"):
            raise ValueError(f"no event: {line[:200]!r}")
        if (data := line[5:].strip()) == b"[DONE]":
            self.is_whole = True
            return
        chunk = orjson.loads(data)
        if "choices" not in chunk:
            raise ValueError(f"the stream broke off: {data[:300]!r}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self._add(choice, now)

    def feed_whole(self, content: bytes, now: float) -> None:
        """Add a reply without stream: all completions end at its arrival."""
        reply = orjson.loads(content)
        if not isinstance(reply, dict) or "choices" not in reply:
            raise ValueError(f"no reply: {content[:300]!r}")
        self.usage, self.is_streamed, self.is_whole = reply.get("usage") or {}, False, True
        for choice in reply["choices"]:
            self._add(choice, now)

    @property
    def ended(self) -> int:
        """The number of ended completions."""
        return sum(times.ended is not None for times in self.completions.values())

    @property
    def tokens(self) -> int:
        return sum(times.tokens for times in self.completions.values())

    def _add(self, choice: Json, now: float) -> None:
        token_ids = choice.get("token_ids") or ()
        times = self.completions.get(choice["index"])
        if times is None:
            # The end of a completion without tokens has no first token.
            times = self.completions[choice["index"]] = CompletionTimes(now, now)
        if token_ids:
            if not times.tokens:
                times.first, times.first_tokens = now, len(token_ids)
            else:
                times.longest_gap_s = max(times.longest_gap_s, now - times.last)
            times.tokens += len(token_ids)
            times.token_ids += token_ids
            times.last = now
        if choice.get("finish_reason") is not None:
            times.ended = now


def tail_ratio(parts: Sequence[Timeline], began: float) -> float | None:
    """Return a batch's makespan divided by its completions' mean time: 1 if all end together, 2 if the last takes twice
    the mean. None for replies without stream."""
    if not all(part.is_streamed for part in parts):
        return None
    times = [times.ended - began for part in parts for times in part.completions.values() if times.ended is not None]
    mean = sum(times) / len(times)
    return max(times) / mean if mean > 0 else None
