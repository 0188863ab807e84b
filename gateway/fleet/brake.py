"""The brake of a replica's engine: the set of its holders. The engine generates while nobody holds it.

This is the only place that pauses and resumes an engine of a replica. A holder that lets go, on whatever exit, has the
engine resumed unless another still holds it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

import structlog

from engines.engine import Engine
from engines.errors import DeadlineExceeded, EngineError
from engines.types import PauseMode

log = structlog.get_logger()

_RETRY_S = 1.0
_TIMEOUT_S = 60.0


class Holder(StrEnum):
    """The reasons to hold an engine still."""

    UPDATE = "weight update"
    TRAINER = "pause"
    CATCH_UP = "catch-up"


class Brake:
    """Holders join and leave at once; the engine follows, one call at a time, until `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._holders: set[Holder] = set()
        self._is_stopped = False
        self._lifted = 0
        self._one_call = asyncio.Lock()
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def holders(self) -> frozenset[Holder]:
        return frozenset(self._holders)

    async def stop(self, by: Holder, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        """Hold the engine, and pause it where it still runs or `mode` changes its requests in flight.

        With `wait` a frozen engine would go on to the end of its requests, so this waits for the other holders first.
        """
        self._holders.add(by)  # before the call: its answer may come late or never, and the engine be paused
        while mode is PauseMode.WAIT and self._holders - {by}:
            await self._changed.wait()
        async with self._one_call:
            if self._is_stopped and mode is PauseMode.KEEP and not clear_cache:
                return
            self._is_stopped = True
            await self._engine.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)
        self._follow()  # a question may have come meanwhile

    def join(self, by: Holder) -> None:
        """Hold an engine on, where another holds it already."""
        if self._holders:
            self._holders.add(by)

    async def release(self, by: Holder, timeout_s: float) -> None:
        """Let go, and return when the engine generates, if nobody else holds it. Raises what `Engine.resume` raises;
        the resume is retried then."""
        self._leave(by)
        try:
            await self._follow_once(timeout_s)
        except BaseException:
            self._follow()
            raise

    def let_go(self, by: Holder) -> None:
        """As `release`, without a wait."""
        self._leave(by)
        self._follow()

    @asynccontextmanager
    async def lifted(self, timeout_s: float) -> AsyncIterator[None]:
        """Has a held engine run during the block, to answer a question; it may take so long to resume."""
        self._lifted += 1
        self._follow()
        try:
            if self._following is not None:
                await asyncio.wait([self._following], timeout=timeout_s)
            yield
        finally:
            self._lifted -= 1
            self._follow()

    def close(self) -> None:
        """The engine is gone, or the gateway ends: it is not called any more, whoever lets go later."""
        self._is_closed = True
        if self._following is not None:
            self._following.cancel()

    @property
    def _is_held(self) -> bool:
        return bool(self._holders) and not self._lifted

    def _leave(self, by: Holder) -> None:
        self._holders.discard(by)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _follow(self) -> None:
        if self._is_closed:
            return
        if self._is_stopped != self._is_held and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._follow_until(), name=f"brake of {self._engine.replica_id}")

    async def _follow_until(self) -> None:
        while self._is_stopped != self._is_held:
            try:
                await self._follow_once(_TIMEOUT_S)
            except Exception as error:  # of any kind: an engine that nobody holds must not stay paused
                is_expected = isinstance(error, EngineError | DeadlineExceeded)
                log.warning(
                    "engine does not follow its brake", replica=self._engine.replica_id,
                    error=str(error) or type(error).__name__, exc_info=not is_expected,
                )  # fmt: skip
                await asyncio.sleep(_RETRY_S)

    async def _follow_once(self, timeout_s: float) -> None:
        async with self._one_call:
            if self._is_stopped and not self._is_held:
                await self._engine.resume(timeout_s)
                self._is_stopped = False
            elif self._is_held and not self._is_stopped:
                self._is_stopped = True
                await self._engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=timeout_s)
