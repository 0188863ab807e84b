"""The engine of one replica with the reader beside it. An engine that ends is followed by another where it stands."""

import asyncio
import time
from collections.abc import Callable

import structlog

from engines.clients.external import ExternalServer
from engines.engine import Engine
from engines.errors import EngineError
from engines.process.engine_server import EngineServer
from engines.process.standby import Standby
from engines.reading.server import ReaderThread
from engines.types import Phase, ReplicaInfo

log = structlog.get_logger()

_APART_S = 20.0
"""An engine that ends sooner after it was started again is left to the owner, which starts a whole replica."""


class KeptEngine:
    """One engine server, its reader, and its standby where the configuration has one.

    server: the first one.
    client: makes the client with which the reader asks an engine.
    on_start: called with the description of each engine that serves here, once it does.
    info, reader: of the engine that serves, or served last.
    standby: None without one.
    """

    def __init__(
        self,
        server: EngineServer | ExternalServer,
        client: Callable[[ReplicaInfo], Engine],
        *,
        has_standby: bool,
        on_start: Callable[[ReplicaInfo], None] = lambda _: None,
    ) -> None:
        self._server = server
        self._client = client
        self._on_start = on_start
        self.standby = Standby() if has_standby else None
        self._keeper: asyncio.Task[None] | None = None
        self._is_starting = True
        self.info: ReplicaInfo
        self.reader: ReaderThread | None = None

    async def start(self) -> None:
        """Start the first engine, and own its successors. Raises as `EngineServer.start` does."""
        await self._start()
        self._keeper = asyncio.create_task(self._keep(), name="keeper of an engine")

    async def ended(self) -> None:
        """Return when an engine has ended and no other follows; raise the error of a successor's start."""
        assert self._keeper is not None
        await asyncio.shield(self._keeper)

    async def keep_no_longer(self) -> None:
        """Let no engine follow the one that serves, which goes on."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def stop(self) -> None:
        """End all. A start that failed, or was cancelled, has left nothing but needs it too."""
        await self.keep_no_longer()
        if self.reader is not None:
            await asyncio.to_thread(self.reader.stop)
            self.reader = None
        standby = [self.standby.stop()] if self.standby is not None else []
        await asyncio.gather(self._server.stop(), *standby)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those of a start that goes on, also of a standby that is waited for; () where none does."""
        server = (self.standby.server if self.standby is not None else None) or self._server
        return server.phases.told() if self._is_starting and isinstance(server, EngineServer) else ()

    async def check(self) -> None:
        """Raise if the engine does not serve, unless it is being started again, or if its reader has ended."""
        if self._keeper is not None and self._keeper.done():
            self._keeper.result()  # its error
        if not self._is_starting:
            await self._server.check()
        if self.reader is None or not self.reader.is_alive:
            raise EngineError("the thread that reads the engine has ended", replica_id=self.info.replica_id)

    async def check_server(self) -> None:
        """Raise if the engine does not serve, for whatever reason."""
        await self._server.check()

    async def _start(self) -> None:
        info = await self._server.start()
        reader = ReaderThread(lambda: self._client(info))
        await asyncio.to_thread(reader.start)
        info = await reader.beside(info, "127.0.0.1")
        before, self.info, self.reader = self.reader, info, reader
        if before is not None:
            await asyncio.to_thread(before.stop)
        self._is_starting = False
        self._on_start(info)
        if self.standby is not None and isinstance(self._server, EngineServer):
            self.standby.begin(self._server)

    async def _keep(self) -> None:
        """Let another engine follow whenever one has ended: Serve would notice after seconds, and start a replica."""
        restarted = -_APART_S
        while isinstance(self._server, EngineServer):
            await self._server.ended()
            self._is_starting = True  # while a standby that starts is waited for, Serve shall not end both
            standby = await self.standby.take() if self.standby is not None else None
            if standby is None and time.monotonic() < restarted + _APART_S:
                self._is_starting = False
                return
            log.warning("the engine has ended, and another follows", replica=self.info.replica_id)
            ended, self._server = self._server, standby or self._server
            await ended.stop()
            await self._start()
            restarted = time.monotonic()
