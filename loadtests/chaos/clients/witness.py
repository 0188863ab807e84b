"""The witness of the chaos campaign: clients that never stop and check every token.

The simulated engine's tokens are a pure function of prompt, seed and weights: each completion is recomputed from its
reported weight versions.
"""

import itertools
import time
from collections.abc import Awaitable, Callable

from engines.config import SimConfig
from loadtests.chaos.clients.callers import Callers
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.faults import Newest

_TOKENS = 40


class Witness(Callers):
    """Clients that send seeded batches, and take an error for a failure: they ask again only where a connection fails,
    since a dead gateway has reported nothing."""

    def __init__(self, url: str, sim: SimConfig, newest: Newest, *, num_clients: int, bound_s: float) -> None:
        super().__init__(url, sim, newest, tokens=_TOKENS, bound_s=bound_s)
        self._num_clients = num_clients
        self._hurt_at = time.monotonic()

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"completions": self.completions}

    @property
    def longest_silence_s(self) -> float:
        """Return the longest time without a delivery since `hurt_now`."""
        times = [self._hurt_at, *(at for at, _ in self.record.deliveries if at > self._hurt_at)]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def hurt_now(self) -> None:
        """Start to measure the longest time without a delivery."""
        self._hurt_at = time.monotonic()

    def watch(self) -> None:
        """Let all clients send without pause, from a new record on."""
        self.start(self._num_clients)

    async def seen(self) -> Tally:
        """Wait for every client's last answer; rollouts without one are lost."""
        tally = (await self.stop()).tally
        await self.close()
        return tally

    def _may_retry(self, status: int) -> bool:
        return status == 0
