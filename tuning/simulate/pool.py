"""Batches as `RolloutPool` of the trainer's client makes them: the first groups end each, and the others go on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from tuning.simulate.engine import Sample
from tuning.simulate.workloads.workload import Ask, Chain, Stream

Follow = Callable[[Ask, list[Sample]], Awaitable[None]]
"""Has the fleet make an ask; its samples are put on the list, with the tokens that they have."""


@dataclass(slots=True, eq=False)
class _Group:
    """One prompt in work; `made` has the tokens of each sample from earlier batches, `began` the first of them."""

    ask: Ask
    began: int
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = [0] * len(self.ask.lengths)

    def asks(self, batch: int, most: int | None) -> Iterator[tuple[Ask, Sequence[int]]]:
        """Yield what a batch asks for, with the places of its samples: the group in parts, or each sample's rest."""
        asked = replace(self.ask, request=f"pool-{batch}", prefix=(batch, self.ask.request, self.ask.text))
        if not any(self.made):
            places = iter(range(len(self.made)))
            for part in asked.parts(most):
                yield part, list(islice(places, len(part.lengths)))
            return
        for place, (length, made) in enumerate(zip(self.ask.lengths, self.made, strict=True)):
            if made < length:
                yield replace(asked, lengths=(length,), made=made), [place]


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of `size` groups. A batch waits for groups that began `max_staleness` batches before it, unless 0."""

    size: int
    max_staleness: int = 0


class PoolRun:
    """Plays a stream's batches out of a pool, which reads the stream's prompts in their order, again and again."""

    def __init__(
        self, stream: Stream, pool: Pool, follow: Follow, rank: Callable[[Chain], float], most: int | None
    ) -> None:
        """`most` samples of a group stay together."""
        self._batches = [len(phase) for phase in stream]
        self._asks = cycle([chain[0] for phase in stream for chain in phase])
        self._pool = pool
        self._follow = follow
        self._rank = rank
        self._most = most
        self._open: list[_Group] = []
        self._ended: list[_Group] = []
        self.tokens = 0
        """Tokens of the samples that batches took."""
        self.lags: list[int] = []
        """Batches before its own in which a group that was taken has begun."""

    async def play(self) -> None:
        for number, taken in enumerate(self._batches):
            room = self._pool.size - len(self._open) - len(self._ended)
            self._open += [_Group(ask, number) for ask in islice(self._asks, room)]
            await self._make(number, taken)
            self._ended.sort(key=lambda group: group.began)
            for group in self._ended[:taken]:
                self.tokens += sum(group.ask.lengths)
                self.lags.append(number - group.began)
            del self._ended[:taken]

    async def _make(self, number: int, taken: int) -> None:
        """Make groups until so many have ended, and stop the others where they are."""
        enough = asyncio.Event()

        async def make(group: _Group) -> None:
            await asyncio.gather(*(self._made(group, ask, places) for ask, places in group.asks(number, self._most)))
            self._open.remove(group)
            self._ended.append(group)
            if self._has(taken, number):
                enough.set()

        if not self._has(taken, number):
            making = [
                asyncio.ensure_future(make(group))
                for group in sorted(self._open, key=lambda one: self._rank([one.ask]))
            ]
            await enough.wait()
            for one in making:
                one.cancel()
            await asyncio.gather(*making, return_exceptions=True)

    def _has(self, taken: int, number: int) -> bool:
        bound = self._pool.max_staleness
        return len(self._ended) >= taken and not (bound and any(number - one.began >= bound for one in self._open))

    async def _made(self, group: _Group, ask: Ask, places: Sequence[int]) -> None:
        samples: list[Sample] = []
        try:
            await self._follow(ask, samples)
        finally:
            for place, sample in zip(places, samples, strict=False):
                group.made[place] = sample.made
