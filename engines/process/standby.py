"""A second engine of a replica, that sleeps until the first one ends.

A new engine imports, compiles and captures graphs. A standby has done so, and needs memory and weights.
"""

import asyncio
import time

import structlog

from engines.errors import ConfigError, DeadlineExceeded, EngineError
from engines.process.engine_server import EngineServer

log = structlog.get_logger()

_AGAIN_S, _LONGEST_WAIT_S = 20.0, 600.0
"""Time from the end of a standby to the next, and after several that did not live so long: it may not be able to."""


class Standby:
    """Owns the second engine of one replica, and the task that starts it.

    server: that engine, while it starts or sleeps; None where there is none.
    """

    def __init__(self) -> None:
        self.server: EngineServer | None = None
        self._has_started = asyncio.Event()
        self._has_started.set()
        self._task: asyncio.Task[None] | None = None

    def begin(self, beside: EngineServer) -> None:
        """Start one beside an engine that serves, and another whenever it ends."""
        self._has_started.clear()
        self._task = asyncio.create_task(self._keep(beside), name="standby")

    async def take(self) -> EngineServer | None:
        """Return the sleeping engine, which is the caller's then; None where none is ready.

        Wait for one that starts: a new engine would start no sooner.
        """
        await self._has_started.wait()
        server, self.server = self.server, None
        await self.stop()
        return server

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep(self, beside: EngineServer) -> None:
        wait_s = _AGAIN_S / 2
        while True:
            self._has_started.clear()
            server: EngineServer | None = None
            try:
                server = self.server = await asyncio.to_thread(beside.standby)
                await server.start()
                await server.sleep()
                since = time.monotonic()
                self._has_started.set()
                await server.ended()
                log.warning("a standby has ended")
                if time.monotonic() - since > _LONGEST_WAIT_S:
                    wait_s = _AGAIN_S / 2
            except (ConfigError, EngineError, DeadlineExceeded) as error:
                log.warning("a standby did not start", reason=str(error))
                if server is None:
                    return
            finally:
                if server is not None and self.server is server:  # else it was taken
                    self.server = None
                    await server.stop()
                self._has_started.set()
            await asyncio.sleep(wait_s := min(2 * wait_s, _LONGEST_WAIT_S))
