"""The Serve replica: owns one engine server and its GPUs, reads what it makes, and describes it to the gateway."""

import asyncio
import contextlib
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import ray
import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from engines.clients.external import ExternalServer, connect
from engines.config import EngineConfig
from engines.errors import DeadlineExceeded, EngineError
from engines.process.engine_server import EngineServer
from engines.process.kept_engine import KeptEngine
from engines.process.log_lines import write_log_lines
from engines.types import EngineKind, EngineStart, ReplicaInfo

log = structlog.get_logger()

_ASK_TIMEOUT_S = 5.0
_ASK_EVERY_S = 0.5
_TELL_EVERY_S = 1.0


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
        server = _server(config, self._id, group, index, hidden)
        self._has_started = asyncio.Event()
        self._engine = KeptEngine(
            server,
            partial(connect, api_key=config.api_key.get_secret_value() if config.api_key else ""),
            has_standby=config.standby > 0,
            on_start=lambda _: self._has_started.set(),
        )
        self._from_afar: ReplicaInfo | None = None
        self._opening = asyncio.Lock()
        self._telling = asyncio.create_task(self._tell_starts(), name="tell starts")
        await self._engine.start()

    async def _tell_starts(self) -> None:
        """Tell the gateway each second how far a start has come, since Serve shows it no replica that is not up, and
        that an engine has started."""
        gateway = serve.get_deployment_handle("gateway", self._app_name)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_started.wait(), _TELL_EVERY_S)
            has_started = self._has_started.is_set()
            self._has_started.clear()
            if (phases := self._engine.phases) or has_started:
                start = EngineStart(replica_id=self._id, group=self._group, phases=phases)
                with contextlib.suppress(TimeoutError, RayError, RayServeException):  # the gateway starts too
                    async with asyncio.timeout(_ASK_TIMEOUT_S):
                        await gateway.tell.remote(start)

    def incarnation(self) -> str:
        """Return the id of this engine start: a cheap call, made each second, that shows a restart."""
        return self._engine.info.incarnation

    async def describe(self, node: str) -> ReplicaInfo:
        """Return the replica's description, with a reader that a gateway on `node` can reach.

        A port beyond loopback is opened only at the first call from another node.
        """
        own = ray.get_runtime_context().get_node_id()
        async with self._opening:
            info = replace(self._engine.info, node=own)
            if node == own:
                return info
            if self._from_afar is None or self._from_afar.incarnation != info.incarnation:
                self._from_afar = await self._opened(info)
            return self._from_afar

    async def _opened(self, info: ReplicaInfo) -> ReplicaInfo:
        assert self._engine.reader is not None
        host = ray.util.get_node_ip_address()
        info = await self._engine.reader.beside(info, host)
        if info.kind is EngineKind.EXTERNAL:
            return info
        address = f"[{host}]" if ":" in host else host
        return replace(info, url=info.url.replace("127.0.0.1", address), is_far=True)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Serve how many replicas would run at once what the gateway has for this group. Serve asks where the
        group may grow."""
        gateway = serve.get_deployment_handle("gateway", self._app_name)
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return {"wanted": await gateway.samples.remote(self._group) / self._config.max_num_seqs}

    async def check_health(self) -> None:
        """Raise as `KeptEngine.check` does; Serve then restarts the replica."""
        await self._engine.check()

    async def __del__(self) -> None:
        """Drain and stop. Serve awaits this on removal, for at most graceful_shutdown_timeout_s."""
        if not hasattr(self, "_telling"):
            return
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        await self._engine.keep_no_longer()
        if self._engine.reader is not None:
            await self._drained()
        await self._engine.stop()

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
                while samples := await gateway.drain.remote(self._engine.info.replica_id):
                    if time.monotonic() > deadline:
                        log.warning("removed with rollouts", replica=self._engine.info.replica_id, samples=samples)
                        return
                    await self._engine.check_server()
                    await asyncio.sleep(_ASK_EVERY_S)
                    bound.reschedule(asyncio.get_running_loop().time() + _ASK_TIMEOUT_S)
        except (TimeoutError, EngineError, DeadlineExceeded, RayError, RayServeException) as error:
            log.warning("not drained", replica=self._engine.info.replica_id, error=repr(error))

    async def _app_goes_on(self) -> bool:
        """Return False if Serve removes the whole application: then there is nothing to drain."""
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            applications = (await asyncio.to_thread(serve.status)).applications
        found = applications.get(self._app_name)
        return found is not None and found.status != ApplicationStatus.DELETING


def _server(
    config: EngineConfig, replica_id: str, group: str, index: int, hidden: Sequence[str]
) -> EngineServer | ExternalServer:
    if config.kind is EngineKind.EXTERNAL:
        return ExternalServer(config, replica_id=replica_id, group=group)
    return EngineServer(config, replica_id=replica_id, group=group, index=index, hidden=hidden)
