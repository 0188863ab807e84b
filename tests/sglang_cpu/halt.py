"""An order to an engine to stand still by itself in the step in which each of its samples has so many tokens.

A pause from outside comes when it comes: on a fast machine after the samples' end, on a slow one before their tokens.
"""

from collections.abc import Mapping


class Halt:
    """The order, of which the engine's scheduler asks in each step whether it is due."""

    def __init__(self) -> None:
        self._samples = self._tokens = 0
        self._seen: set[str] = set()

    def at(self, samples: int, tokens: int) -> None:
        """Stand still once, when so many samples have begun and those that have not ended have so many tokens."""
        self._samples, self._tokens, self._seen = samples, tokens, set()

    def is_due(self, running: Mapping[str, int]) -> bool:
        """`running`: the tokens of each sample that has begun and not ended."""
        self._seen.update(running)
        if not 0 < self._samples <= len(self._seen) or min(running.values(), default=0) < self._tokens:
            return False
        self._samples = 0
        return True
