"""Runs the gateway server on a port and an event loop of its own, beside whatever hosts it."""

import asyncio
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
import uvloop
from aiohttp import web

from engines.clients.connect import connect
from engines.clients.external import external_engine
from engines.engine import Engine, Json, Peer
from engines.types import EngineKind, ReplicaInfo
from gateway.config.schema import LOOPBACK_HOSTS, Config, GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.http.access import store_key
from gateway.http.server import GatewayServer

log = structlog.get_logger()

T = TypeVar("T")

_START_TIMEOUT_S = 60.0
_SHUTDOWN_TIMEOUT_S = 5.0
_DESCRIPTORS, _DESCRIPTORS_NEEDED = 1 << 20, 16_384
_ANY = ("0.0.0.0", "::", "")  # all addresses of the machine


class Listener:
    """One gateway server on its own thread, so that no host's work stands between two tokens.

    `discover` is called on that thread's loop.
    """

    def __init__(self, config: Config, discover: Callable[[], Awaitable[list[ReplicaInfo]]]) -> None:
        self._config = config
        self._discover = discover
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()
        self._server: GatewayServer | None = None
        self._fleet: Fleet | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> str:
        """Listen; returns the URL. Raises what kept it from listening, such as a port that is taken."""
        self._thread.start()
        return self.url

    @property
    def url(self) -> str:
        return self._started.result(_START_TIMEOUT_S)[2]

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and none of its background tasks has ended."""
        return self._thread.is_alive() and not (self._server and self._server.failure)

    async def status(self) -> Json:
        """The status report, from any loop."""
        return await self._there(self._status())

    async def expect(self, num_replicas: Mapping[str, int]) -> None:
        """So many replicas of these engine groups there are to be from now on; from any loop."""
        await self._there(self._expect(num_replicas))

    async def drain(self, replica_id: str) -> int:
        """Give a replica no new rollouts; the number of samples that it still has. From any loop."""
        return await self._there(self._drain(replica_id))

    def stop(self) -> None:
        loop, stopping, _ = self._started.result(_START_TIMEOUT_S)
        if self._thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
            self._thread.join(2 * _SHUTDOWN_TIMEOUT_S)

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result, on the thread's own loop."""
        loop = self._started.result(_START_TIMEOUT_S)[0]
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    async def _expect(self, num_replicas: Mapping[str, int]) -> None:
        assert self._fleet is not None
        self._fleet.expect(num_replicas)

    async def _drain(self, replica_id: str) -> int:
        assert self._fleet is not None
        return self._fleet.drain(replica_id)

    async def _status(self) -> Json:
        assert self._server is not None
        return self._server.status()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        config, stopping = self._config, asyncio.Event()
        raise_descriptor_limit()
        self._fleet = fleet = Fleet(
            config,
            discover=self._discover,
            connect=lambda info: engine_client(config, info),
        )
        self._server = GatewayServer(config, fleet, Metrics())
        # A client that leaves cancels its handler, which ends its work on the engines.
        runner = web.AppRunner(
            self._server.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, config.gateway.host, config.gateway.port, backlog=2048).start()
            host, port = runner.addresses[0][:2]
            self._started.set_result((asyncio.get_running_loop(), stopping, f"http://{host}:{port}"))
            await stopping.wait()
        finally:
            await runner.cleanup()


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each client and each request to an engine needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            log.warning("the limit of open files cannot be raised", soft=soft, hard=hard, error=str(error))
    if soft != resource.RLIM_INFINITY and soft < _DESCRIPTORS_NEEDED:
        log.warning(
            "few open files are allowed: raise the hard limit (ulimit -Hn) above two for each rollout in flight",
            limit=soft,
        )


def engine_client(config: Config, info: ReplicaInfo) -> Engine:
    """The client of one replica's engine. Keys are the configuration's: a replica tells that of its forwarder alone."""
    peer = _peer(config, info)
    if info.kind is EngineKind.EXTERNAL:
        group = config.groups.get(info.group)
        key = group.api_key if group else None
        return external_engine(info, key.get_secret_value() if key else "", peer)
    return connect(info.kind, info.replica_id, info.url, info.engine_version, info.key, has_tee=info.has_tee, peer=peer)


def _peer(config: Config, info: ReplicaInfo) -> Peer | None:
    """Where it fetches weight versions that its machine does not have."""
    url = config.weights.peer_url or (_as_reached_from(info.url, config.gateway) if info.is_far else None)
    if url is None and info.is_far:
        log.warning(
            "a replica on another node has weight versions only where weights.store is a folder that both share: bind "
            "gateway.host to an address that it reaches, or set weights.peer_url",
            replica=info.replica_id,
        )
    return Peer(url=url, key=store_key(config.gateway)) if url else None


def _as_reached_from(replica_url: str, gateway: GatewayConfig) -> str | None:
    """The gateway's URL for who listens at `replica_url`; None where it has none that is known beforehand."""
    if gateway.host in LOOPBACK_HOSTS or gateway.port == 0:
        return None
    ours = gateway.host
    if ours in _ANY:
        # Of our addresses the one that leads there. A datagram socket that is connected sends nothing yet.
        replica = urlsplit(replica_url)
        family = socket.AF_INET6 if ":" in (replica.hostname or "") else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((replica.hostname, replica.port))
            ours = probe.getsockname()[0]
    return f"http://[{ours}]:{gateway.port}" if ":" in ours else f"http://{ours}:{gateway.port}"
