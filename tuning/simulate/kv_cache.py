"""The KV cache of a modelled engine: prefixes that running sequences hold, and idle ones, least recently used first.

Tokens of one key are one prefix, such as all turns of a session, or the prompt of a group. Engines free a sequence from
its end, so the eviction of an idle prefix takes its end first and leaves what comes before useful.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

Key = Hashable


@dataclass(slots=True)
class _Held:
    tokens: int
    users: int


class KvCache:
    """Counts tokens. `used` are those of running sequences; idle prefixes take what is left, at most."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.evicted = 0
        self._held: dict[Key, _Held] = {}
        self._idle: OrderedDict[Key, int] = OrderedDict()
        self._idle_tokens = 0

    @property
    def free(self) -> int:
        """Tokens that running sequences may take, idle prefixes evicted."""
        return self.capacity - self.used

    def new_tokens(self, key: Key, tokens: int) -> int:
        """Return by how much `used` grows with `hold`."""
        held = self._held.get(key)
        return tokens if held is None else max(0, tokens - held.tokens)

    def hold(self, key: Key, tokens: int) -> int:
        """Hold a prefix of so many tokens for one more sequence; return how many of them were there."""
        held = self._held.get(key)
        if held is None:
            idle = self._idle.pop(key, 0)
            self._idle_tokens -= idle
            self._held[key] = _Held(tokens, 1)
            self.use(tokens)
            return min(idle, tokens)
        there = min(held.tokens, tokens)
        held.users += 1
        self.use(tokens - there)
        held.tokens += tokens - there
        return there

    def let_go(self, key: Key, more: int = 0) -> None:
        """Let a sequence's hold go. `more` tokens of it, which are in use too, are the prefix's from now on."""
        held = self._held[key]
        held.users -= 1
        held.tokens += more
        if not held.users:
            del self._held[key]
            self.used -= held.tokens
            self._keep(key, held.tokens)

    def use(self, tokens: int) -> None:
        """Take tokens for running sequences."""
        self.used += tokens
        self._evict()

    def resume(self, key: Key, tokens: int) -> int:
        """Take again what a sequence has left; return how many of its tokens are still there."""
        there = self._idle.pop(key, 0)
        self._idle_tokens -= there
        self.use(tokens)
        return there

    def leave(self, key: Key, tokens: int) -> None:
        """Give back tokens of a sequence, which stay as an idle prefix of their own."""
        self.used -= tokens
        self._keep(key, tokens)

    def _keep(self, key: Key, tokens: int) -> None:
        self._idle_tokens += tokens - self._idle.pop(key, 0)
        self._idle[key] = tokens
        self._evict()

    def _evict(self) -> None:
        excess = self._idle_tokens - self.free
        while excess > 0 and self._idle:
            key, tokens = next(iter(self._idle.items()))
            taken = min(tokens, excess)
            excess -= taken
            self._idle_tokens -= taken
            self.evicted += taken
            if taken == tokens:
                del self._idle[key]
            else:
                self._idle[key] = tokens - taken
