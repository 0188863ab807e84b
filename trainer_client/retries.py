"""When a call is made again.

| error | made again |
| --- | --- |
| 429: over a limit | after Retry-After and a random time, until the call's time is over |
| no connection, a broken one, 503: the gateway is away | for `outage_s`, longer than a restart of it takes |
| 502, 504: the gateway has given the call up, so that nothing runs twice | `attempts` times |
| any other | never |
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engines.errors import GatewayUnreachable, RolloutGatewayError, TooManyRequests
from gateway.api import status_of
from trainer_client.http import CONNECT_TIMEOUT_S

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
_PASSING = (502, 503, 504)
"""Of errors with which the gateway has given up on the call, so nothing runs twice."""

T = TypeVar("T")


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Retries:
    """The attempts of one call, whose time of `timeout_s` ends at `deadline` of the loop's clock."""

    attempts: int
    outage_s: float
    timeout_s: float
    deadline: float
    is_again: bool = True
    """False for a call that is not made again where it may have arrived."""
    made: int = 1
    """Attempts so far."""
    last: RolloutGatewayError | None = None
    _given_up: int = 0
    _outage_began: float | None = None
    _tried_at: float = field(default_factory=now)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.001, round(self.deadline - now(), 3))

    async def run(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Make the call, which is told the seconds that are left, until it succeeds. Raise its last error."""
        while True:
            try:
                return await ask(self.left_s)
            except RolloutGatewayError as error:
                self.last = error
                await self._pause(error)

    async def _pause(self, error: RolloutGatewayError) -> None:
        """Sleep until the attempt after `error`. Raise it where none is due."""
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self.made - 1, 10), LONGEST_PAUSE_S)
        if isinstance(error, TooManyRequests):
            pause = error.retry_after_s + random.uniform(0.0, pause)  # not all prompts at once
            if now() + pause >= self.deadline:
                late = f"timeout_s = {self.timeout_s:g} ends before the next attempt in {pause:.1f} s"
                error.args = (f"{error}; Retry-After is {error.retry_after_s:g} s, and {late}",)
                raise error
        elif isinstance(error, GatewayUnreachable):
            if self._outage_began is None or now() - self._tried_at > CONNECT_TIMEOUT_S:  # reached, and lost again
                self._outage_began = now()
            is_over = now() + pause >= self._outage_began + self.outage_s
            if is_over or (error.arrived and not self.is_again):
                raise error
        else:
            self._given_up, self._outage_began = self._given_up + 1, None
            if status_of(error) not in _PASSING or self._given_up >= self.attempts:
                raise error
        await asyncio.sleep(pause)
        self.made, self._tried_at = self.made + 1, now()
