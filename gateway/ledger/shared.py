"""The ledger of one gateway as its users share it: opened at the first use, tried again after a failure."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from gateway.ledger.ledger import Ledger, Work

log = structlog.get_logger()

_RETRY_S = 30.0


class User(Protocol):
    """Keeps records in the ledger."""

    def take_up(self, ledger: Ledger, *, is_left: bool) -> None:
        """Have all that memory has written into `ledger`. Bring back what it has where a gateway before this one has
        left it, else drop that."""


class SharedLedger:
    """`make` makes a ledger; None keeps none."""

    def __init__(self, make: Callable[[], Ledger] | None) -> None:
        self._make = make
        self._users: list[User] = []
        self._opening: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._is_read = False
        self.current: Ledger | None = None
        """The ledger, once it has been opened."""
        self.life = int(time.time())
        """Number of this gateway's life, which grows."""

    @property
    def is_on(self) -> bool:
        """False where none is configured."""
        return self._make is not None

    @property
    def is_durable(self) -> bool:
        """True if what is written outlives the gateway."""
        return self.current is not None and not self.current.failure

    @property
    def unread(self) -> str:
        """The reason why records of a gateway before this one may be unknown yet; "" where they are known."""
        return "" if self._is_read or self.current is None else self.current.failure

    def add(self, user: User) -> None:
        self._users.append(user)

    def put(self, work: Work, then: Callable[[], None]) -> None:
        """Have `work` done in its turn, then call `then`; at once where nothing is written."""
        if self.current is None:
            then()
        else:
            self.current.put(work, then)

    async def open(self) -> None:
        """Open the file that a gateway before this one has left, if there is any."""
        if self._make is not None and self._make().path.exists():
            await self.opened()

    async def opened(self) -> None:
        """Open the ledger, once, and let its users take it up."""
        if self._make is None:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(self._make()), name="open the ledger")
        await asyncio.shield(self._opening)

    async def renew(self) -> None:
        """Try a new file after a failure, and have all that memory has written into it."""
        if self.current is None or not self.current.failure or self.current.is_at_work:
            return
        if time.monotonic() < self._retry_at:
            return
        assert self._make is not None
        self._retry_at = time.monotonic() + _RETRY_S
        renewed = self._make()
        await renewed.open()
        self._begin(renewed)
        if not renewed.failure:
            log.info("the ledger is kept again", file=str(renewed.path))

    async def close(self) -> None:
        """Write what waits."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        if self.current is not None:
            await self.current.close()

    async def _open(self, ledger: Ledger) -> None:
        await ledger.open()
        self._retry_at = time.monotonic() + _RETRY_S
        self._begin(ledger)

    def _begin(self, ledger: Ledger) -> None:
        """Have a ledger used. The first one that could be read has what a gateway before this one has left."""
        self.current = ledger
        if ledger.failure:
            return
        self.life = max(self.life + 1, ledger.life)
        is_left, self._is_read = not self._is_read, True
        for user in self._users:
            user.take_up(ledger, is_left=is_left)
        ledger.let_go()
