"""Remembers how long the samples of each prompt were, so that a batch can begin with the longest.

A trainer sends the same prompts epoch after epoch, and may send the samples of a group one by one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

_REMEMBERED = 100_000
_NEWEST_SHARE = 0.5


def prompt_key(prompt: str | Sequence[int]) -> int:
    """Return a hash of a prompt; 0, which is no key, for a list that cannot be hashed."""
    try:
        return hash(prompt if isinstance(prompt, str) else tuple(prompt))
    except TypeError:  # an engine will refuse it
        return 0


class Lengths:
    """The mean number of tokens of a prompt's samples, by model. The least recently delivered are forgotten beyond
    `limit` prompts of a model."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._lengths: defaultdict[str, OrderedDict[int, float]] = defaultdict(OrderedDict)

    def of(self, model: str, key: int) -> float | None:
        """Return the expected tokens of a sample; None for a prompt of which nothing was delivered."""
        return self._lengths[model].get(key)

    def delivered(self, model: str, key: int, tokens: float) -> None:
        """Note the mean length of samples; what was known counts for a half."""
        if not key:
            return
        lengths = self._lengths[model]
        before = lengths.get(key, tokens)
        lengths[key] = before + _NEWEST_SHARE * (tokens - before)
        lengths.move_to_end(key)
        if len(lengths) > self._limit:
            lengths.popitem(last=False)
