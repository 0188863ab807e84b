"""Runs the gateway server on its own port and event loop, beside the host's."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
import uvloop
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from engines.clients.external import connect
from engines.engine import Engine
from engines.errors import ConfigError
from engines.reading.link import Link
from engines.store.weight_store import is_kept
from engines.types import ReplicaInfo
from gateway.api import error_body
from gateway.config.addresses import url_of
from gateway.config.schema import Config, GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.http.json_body import reply
from gateway.http.server import GatewayServer
from gateway.weights.snapshots import AUTO, in_memory

log = structlog.get_logger()

T = TypeVar("T")

_START_TIMEOUT_S = 90.0
_SHUTDOWN_TIMEOUT_S = 5.0
_STORE_FREE_WITHIN_S = 5.0
_KEEPALIVE_S = 900.0
UNREAD_TIMEOUT_S = 60.0
"""Time after which the kernel ends a connection whose client reads nothing of a reply that fills its buffer."""
_MOST_FILES, _FEW_FILES = 1 << 20, 16_384
_BACKLOG = 2048


class Listener:
    """One gateway server on its own thread, so that no work of the host delays tokens.

    `discover` is called on that thread's loop.
    """

    def __init__(self, config: Config, discover: Callable[[], Awaitable[list[ReplicaInfo]]]) -> None:
        self._config = config
        self._discover = discover
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()
        self._server: GatewayServer | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> str:
        """Listen, and return the URL. Raise `ConfigError` for a port that is taken."""
        self._thread.start()
        return self.url

    @property
    def url(self) -> str:
        return self._started.result(_START_TIMEOUT_S)[2]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of its thread."""
        return self._started.result(_START_TIMEOUT_S)[0]

    @property
    def is_alive(self) -> bool:
        """True while the thread runs and none of its background tasks has ended."""
        return self._thread.is_alive() and not (self._server and self._server.failure)

    def stop(self) -> None:
        loop, stopping, _ = self._started.result(_START_TIMEOUT_S)
        if self._thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
            self._thread.join(4 * _SHUTDOWN_TIMEOUT_S)

    async def ask(self, call: Callable[[GatewayServer], T]) -> T:
        """Return the call's result from the thread's own loop; from any loop."""

        async def called() -> T:
            assert self._server is not None
            return call(self._server)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))

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
        raise_limit()
        await _store_is_free(config)
        fleet = Fleet(config, discover=self._discover, connect=lambda info: engine_client(config, info))
        self._server = GatewayServer(config, fleet, Metrics())
        # A client that leaves cancels its handler, which ends its work on the engines.
        runner = web.AppRunner(
            self._server.application(),
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
        await runner.setup()
        try:
            with contextlib.closing(await listen(runner, config.gateway)) as listening:
                url = url_of(*listening.sockets[0].getsockname()[:2])
                # What is there from the start stays: to look for garbage in it takes 60 ms of the loop each time.
                gc.collect()
                gc.freeze()
                gc.set_threshold(20_000)
                self._started.set_result((asyncio.get_running_loop(), stopping, url))
                await stopping.wait()
        finally:
            gc.unfreeze()
            await runner.cleanup()


class Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a head that cannot be read, and failures outside of the application."""
        if status >= 500:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
        else:
            # Without the message, which repeats lines of the head: these may have a key.
            log.info("a request cannot be read", peer=request.remote, status=status, error=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response is sent already")
        response = reply(error_body(f"the request cannot be read: {message or exc}", status), status)
        response.force_close()
        return response


async def listen(runner: web.AppRunner, gateway: GatewayConfig) -> asyncio.Server:
    """Begin to serve an application; return what listens. Raise `ConfigError` for an address that cannot be bound."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    connected = partial(
        Connection,
        server,
        loop=loop,
        access_log=None,  # type: ignore[arg-type]  # there is none
        keepalive_timeout=_KEEPALIVE_S,
    )
    try:
        listening = await loop.create_server(connected, gateway.host, gateway.port, backlog=_BACKLOG)
    except OSError as error:
        reason = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"gateway.port = {gateway.port} on {gateway.host} cannot be bound: {reason}; choose another port, or 0"
        ) from error
    for theirs in listening.sockets:
        with socket.socket(fileno=os.dup(theirs.fileno())) as ours:  # uvloop's own has no options
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT_S * 1000))
    return listening


async def _store_is_free(config: Config) -> None:
    """Raise `ConfigError` where another gateway keeps this weight store. A gateway that is just ending releases it."""
    folder = in_memory(config.name) if config.weights.store == AUTO else Path(config.weights.store or os.devnull)
    deadline = time.monotonic() + _STORE_FREE_WITHIN_S
    while await asyncio.to_thread(is_kept, folder):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"another gateway on this machine keeps the weight store {folder}, and two gateways never share a "
                f"store: set another `name` than {config.name!r}, or another folder in weights.store"
            )
        await asyncio.sleep(0.1)


def engine_client(config: Config, info: ReplicaInfo) -> Engine:
    """Return the client of a replica's engine, with the way to the reader beside it."""
    group = config.groups.get(info.group)
    key = group.api_key if group else None
    engine = connect(info, key.get_secret_value() if key else "")
    engine.beside = Link(info.replica_id, info.reader, info.reader_key)
    return engine


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each client and each request to an engine needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # beyond what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < _FEW_FILES:
        log.warning(
            "few open files are allowed: raise the hard limit (ulimit -Hn) above two for each rollout in flight",
            limit=soft,
        )
