"""The Serve replica: owns one engine server and its GPUs, reads what it makes, and describes it to the gateway."""

import asyncio
import contextlib
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

import ray
import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from engines.clients.connect import connect
from engines.clients.external import ExternalServer, external_engine
from engines.config import EngineConfig
from engines.engine import Engine
from engines.errors import DeadlineExceeded, EngineError
from engines.process.engine_server import EngineServer
from engines.process.forwarder import Forwarder
from engines.process.log_lines import write_log_lines
from engines.reading.server import ReaderThread
from engines.types import EngineKind, EngineStart, ReplicaInfo

log = structlog.get_logger()

_LOOPBACK = "127.0.0.1"
_ASK_TIMEOUT_S = 5.0
_ASK_EVERY_S = 0.5
_TELL_EVERY_S = 1.0
_APART_S = 20.0
"""An engine that ends sooner after it was started again is left to Serve, which starts a whole replica."""


class EngineReplica:
    """Deployed by `gateway.app`. Ready when its engine is; the engine ends with it, also on SIGKILL."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, group: str, hidden: Sequence[str]
    ) -> None:
        write_log_lines(sys.stdout)  # Serve's log of the replica
        # Serve's replica tag, not its rank: Serve reuses ranks, and two replicas with the same name or seed would be
        # confused and would draw the same samples.
        context = serve.get_replica_context()
        index = zlib.crc32(context.replica_tag.encode())
        self._app_name = context.app_name
        self._config = config
        self._id, self._group = f"{group}-{context.replica_tag}", group
        self._server = _server(config, self._id, group, index, hidden)
        self._reader: ReaderThread | None = None
        self._forwarder: Forwarder | None = None
        self._from_afar: ReplicaInfo | None = None
        self._opening = asyncio.Lock()
        self._is_starting = True
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def _start(self) -> None:
        telling = asyncio.create_task(self._tell(), name="tell the start")
        try:
            info = replace(await self._server.start(), node=ray.get_runtime_context().get_node_id())
        finally:
            telling.cancel()
        reader = ReaderThread(lambda: _client(self._config, info))
        await asyncio.to_thread(reader.start)
        info = await reader.beside(info, _LOOPBACK)
        async with self._opening:
            await self._end_reading()  # of the predecessor
            self._info, self._reader, self._forwarder, self._from_afar = info, reader, None, None
        self._is_starting = False

    async def _tell(self) -> None:
        """Tell the gateway each second how far a start has come: Serve shows it no replica that is not up."""
        gateway = serve.get_deployment_handle("gateway", self._app_name)
        while self._is_starting and isinstance(self._server, EngineServer):
            await asyncio.sleep(_TELL_EVERY_S)
            start = EngineStart(replica_id=self._id, group=self._group, phases=self._server.phases.told())
            with contextlib.suppress(TimeoutError, RayError, RayServeException):  # the gateway starts too
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    await gateway.tell.remote(start)

    async def _end_reading(self) -> None:
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        if self._forwarder is not None:
            await self._forwarder.close()

    async def _keep(self) -> None:
        """Start the engine again whenever it has ended: Serve would notice after seconds, and start a replica too."""
        restarted = -_APART_S
        while isinstance(self._server, EngineServer):
            await self._server.ended()
            if time.monotonic() < restarted + _APART_S:
                return
            self._is_starting = True
            log.warning("the engine has ended, and is started again", replica=self._info.replica_id)
            await self._server.stop()
            await self._start()
            restarted = time.monotonic()

    def incarnation(self) -> tuple[str, int]:
        """Return the id of this engine start, and of a process of it that is stopped: a cheap call, made each second,
        that shows a restart and a stop."""
        return self._info.incarnation, 0 if self._is_starting else self._server.stopped

    async def describe(self, node: str) -> ReplicaInfo:
        """Return the replica's description, with an engine URL and a reader that a gateway on `node` can reach.

        Ports beyond loopback are opened only at the first call from another node.
        """
        if node == self._info.node:
            return self._info
        async with self._opening:
            if self._from_afar is None:
                assert self._reader is not None
                host = ray.util.get_node_ip_address()
                info = await self._reader.beside(self._info, host)
                if info.kind is not EngineKind.EXTERNAL:
                    self._forwarder = forwarder = Forwarder(info.url)
                    info = replace(info, url=await forwarder.open(host), key=forwarder.key)
                self._from_afar = info
            return self._from_afar

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve how many replicas would run at once what the gateway has for this group. Serve asks where the
        group may grow."""
        gateway = serve.get_deployment_handle("gateway", self._app_name)
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return {"wanted": await gateway.samples.remote(self._group) / self._config.max_num_seqs}

    async def check_health(self) -> None:
        """Raise if the engine does not serve, unless it is being started again, or if its reader has ended; Serve then
        restarts the replica."""
        if self._keeper.done():
            self._keeper.result()  # its error
        if not self._is_starting:
            await self._server.check()
        if self._reader is None or not self._reader.is_alive:
            raise EngineError("the thread that reads the engine has ended", replica_id=self._info.replica_id)

    async def __del__(self) -> None:
        """Drain and stop. Serve awaits this on removal, for at most graceful_shutdown_timeout_s."""
        if hasattr(self, "_keeper"):
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if hasattr(self, "_info"):
            await self._drained()
        if hasattr(self, "_opening"):
            await self._end_reading()
        if hasattr(self, "_server"):
            await self._server.stop()

    async def _drained(self) -> None:
        """Return when the gateway has no rollouts left here, or cannot be asked.

        Serve reports a removal only to the replica, so the replica reports it to the gateway.
        """
        deadline = time.monotonic() + self._config.drain_timeout_s
        try:
            if not await self._app_goes_on():
                return
            gateway = serve.get_deployment_handle("gateway", self._app_name)
            async with asyncio.timeout(_ASK_TIMEOUT_S) as bound:
                while samples := await gateway.drain.remote(self._info.replica_id):
                    if time.monotonic() > deadline:
                        log.warning("removed with rollouts", replica=self._info.replica_id, samples=samples)
                        return
                    await self._server.check()
                    await asyncio.sleep(_ASK_EVERY_S)
                    bound.reschedule(asyncio.get_running_loop().time() + _ASK_TIMEOUT_S)
        except (TimeoutError, EngineError, DeadlineExceeded, RayError, RayServeException) as error:
            log.warning("not drained", replica=self._info.replica_id, error=repr(error))

    async def _app_goes_on(self) -> bool:
        """Return False if Serve removes the whole application: then there is nothing to drain."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            applications = (await asyncio.to_thread(serve.status)).applications
        found = applications.get(self._app_name)
        return found is not None and found.status != ApplicationStatus.DELETING


def _client(config: EngineConfig, info: ReplicaInfo) -> Engine:
    """The client with which the engine is asked here."""
    if info.kind is EngineKind.EXTERNAL:
        return external_engine(info, config.api_key.get_secret_value() if config.api_key else "")
    return connect(info.kind, info.replica_id, info.url, has_tee=info.has_tee)


def _server(
    config: EngineConfig, replica_id: str, group: str, index: int, hidden: Sequence[str]
) -> EngineServer | ExternalServer:
    if config.kind is EngineKind.EXTERNAL:
        return ExternalServer(config, replica_id=replica_id, group=group)
    return EngineServer(config, replica_id=replica_id, group=group, index=index, hidden=hidden)
