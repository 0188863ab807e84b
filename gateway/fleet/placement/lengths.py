"""Remembers how long the samples of each prompt were, so that a batch can begin with the longest.

A trainer sends the same prompts epoch after epoch, and may send the samples of a group one by one.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

_REMEMBERED = 100_000
_NEWEST_SHARE = 0.5


def prompt_key(prompt: str | Sequence[int]) -> int:
    """Return a hash of a prompt, the same in every process; 0, which is no key, for a list that cannot be hashed."""
    try:
        return _hash_of_text(prompt) if isinstance(prompt, str) else hash(tuple(prompt))
    except TypeError:  # an engine will refuse it
        return 0


def _hash_of_text(text: str) -> int:
    """Unlike `hash`, which is salted in each process."""
    return xxh3_64_intdigest(text.encode(errors="surrogatepass")) >> 1


class Lengths:
    """The mean number of tokens of a prompt's samples, by model. The least recently delivered are forgotten beyond
    `limit` prompts of a model."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._lengths: defaultdict[str, OrderedDict[int, float]] = defaultdict(OrderedDict)

    def of(self, model: str, key: int) -> float | None:
        """Return the expected tokens of a sample; None for a prompt of which nothing was delivered."""
        return self._lengths[model].get(key)

    def all(self) -> list[tuple[str, int, float]]:
        """Return the expected tokens by model and key."""
        return [(model, key, tokens) for model, known in self._lengths.items() for key, tokens in known.items()]

    def delivered(self, model: str, key: int, tokens: float) -> None:
        """Note the mean length of samples; what was known counts for a half."""
        if not key:
            return
        before = self._lengths[model].get(key, tokens)
        self.set(model, key, before + _NEWEST_SHARE * (tokens - before))

    def set(self, model: str, key: int, tokens: float) -> None:
        """Remember the mean length of a prompt's samples."""
        lengths = self._lengths[model]
        lengths[key] = tokens
        lengths.move_to_end(key)
        if len(lengths) > self._limit:
            lengths.popitem(last=False)
