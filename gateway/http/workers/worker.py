"""A worker: serves clients of the generation routes, and lets the owner place its rollouts."""

import asyncio
import gc
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import structlog
from aiohttp import web

from engines import tracing
from gateway.config.schema import Config
from gateway.dialects.chat import Chat
from gateway.dialects.completions import Completions
from gateway.dialects.rendering import Rendering
from gateway.dialects.runner import Runner
from gateway.dialects.token_generation import TokenGeneration
from gateway.dialects.words.sglang_generate import SglangGenerate
from gateway.fleet.metrics import Deliveries, Metrics
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.http.access import Access
from gateway.http.door import raise_limit
from gateway.http.engine_client import engine_client
from gateway.http.guard.tls import Certificate
from gateway.http.middleware import Measurement, note_begin
from gateway.http.own_requests import AbortKind, OwnRequests
from gateway.http.workers.channel import Channel
from gateway.http.workers.copied_fleet import CopiedFleet
from gateway.http.workers.doors import BackDoor, HandedDoor
from gateway.http.workers.hop import Hops, RunsElsewhere, as_sent, door_path
from gateway.http.workers.messages import (
    Abort,
    Batches,
    Changed,
    Crew,
    Done,
    FromOwner,
    FromWorker,
    Gone,
    Hello,
    Joined,
    Judged,
    Lengths,
    NotPlaced,
    Placed,
    Progress,
    Ready,
    Report,
    Stop,
    Sync,
    Versions,
    Withdraw,
)
from gateway.http.workers.remote_scheduler import RemoteScheduler
from gateway.http.workers.routes import WorkerReplays, WorkerRoutes
from gateway.ledger.ledger import Ledger

log = structlog.get_logger()

SHUTDOWN_TIMEOUT_S = 5.0
_PROGRESS_EVERY_S = 0.1
_REPORT_EVERY_S = 1.0
# Ticks without a word of the owner, which speaks every second, after which it stands still for good.
_SILENT_TICKS = 600


class Parts:
    """All that one worker serves with."""

    def __init__(self, hello: Hello, channel: Channel[FromWorker, FromOwner]) -> None:
        self.config = config = Config.model_validate_json(hello.config)
        gateway = config.gateway
        self.folder = Path(hello.folder)
        self.index = hello.index
        self.metrics = Metrics()
        self.scheduler = RemoteScheduler(gateway, channel.send)
        self.fleet = self.scheduler.fleet = CopiedFleet(
            config, connect=lambda info: engine_client(config, info), examine=self.scheduler.examine
        )
        runner = Runner(self.scheduler, self.metrics)
        completions = Completions(gateway, self.fleet, runner)
        self.tokens = TokenGeneration(gateway, self.fleet, runner)
        rendering = Rendering(self.fleet, AnyReplica(self.fleet), gateway.queue_timeout_s)
        chat = Chat(gateway, self.fleet, runner, self.tokens, rendering)
        self.sglang = SglangGenerate(completions, self.fleet)
        self.own = OwnRequests()
        self.replays = WorkerReplays(gateway, completions, self.fleet, self.metrics, Ledger(None))
        self.replays.tell, self.replays.is_owners = channel.send, gateway.ledger is not None
        self._measurement = Measurement(self.metrics, None)
        self._access = Access(gateway)
        self._routes = WorkerRoutes(
            self.fleet,
            completions,
            chat,
            self.tokens,
            self.sglang,
            self._measurement,
            Deliveries(self.fleet, self.metrics),
            self.replays,
            self.own,
            _abort_nothing,
            _leave_to_owner,
        )
        self.hops = Hops(self.folder)

    def application(self, *outermost: object) -> web.Application:
        middlewares = [
            *outermost,
            self.hops.other_routes,
            self._measurement.measure,
            self.hops.other_requests,
        ]
        app = web.Application(client_max_size=self.config.gateway.max_body_bytes, middlewares=middlewares)  # type: ignore[arg-type]
        app.on_response_prepare.append(note_begin)
        self._routes.add_routes(app.router, self._access)
        return app

    async def close(self) -> None:
        await self.replays.close()
        await self.hops.close()
        await self.fleet.close()

    async def abort(self, abort: Abort) -> None:
        """End the requests of these ids that run here."""
        if abort.kind is AbortKind.TOKENS:
            await self.tokens.abort(list(abort.ids), lambda name: self.own.of(name, abort.client))
            return
        for rid in abort.ids:
            for client in self.own.of(rid, abort.client):
                self.sglang.abort(client, rid)


class Worker:
    """The process. It ends with its owner, and when the owner says so."""

    def __init__(self, channel: socket.socket, handed: socket.socket, end: Callable[[], NoReturn]) -> None:
        """`end` ends the process at once, which then can deliver nothing right any more; its owner starts another."""
        self._socket = channel
        self._handed = handed
        self._end = end
        self._channel: Channel[FromWorker, FromOwner] = Channel(FromOwner, self._received, end)
        self._parts: Parts
        self._front: HandedDoor | None = None
        self._stopping = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent_ticks = 0

    async def run(self) -> None:
        """Serve until the owner says to stop."""
        raise_limit()
        await self._channel.open(self._socket)
        await self._stopping.wait()
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        await self._parts.close()
        await asyncio.to_thread(tracing.stop)
        self._report()
        self._channel.close()

    def _received(self, message: FromOwner) -> None:
        self._silent_ticks = 0
        match message:
            case Placed():
                self._parts.scheduler.answer(message.turn, self._parts.fleet.copy_of(message.replica_id))
            case NotPlaced():
                self._parts.scheduler.answer(message.turn, message.failure)
            case Judged():
                self._parts.scheduler.answer(message.turn, message.is_dead)
            case Changed():
                self._parts.fleet.change(message)
            case Versions():
                self._parts.fleet.note(message)
            case Lengths():
                for model, key, tokens in message.lengths:
                    self._parts.scheduler.lengths.set(model, key, tokens)
            case Sync():
                self._channel.send(Done(message.call))
            case Joined():
                self._parts.fleet.join(message)
            case Gone():
                self._parts.fleet.leave(message.replica_id)
            case Withdraw():
                self._parts.scheduler.withdraw(lambda rollout: rollout.model == message.model)
            case Crew():
                self._parts.replays.serve_beside(message.serving)
            case Batches():
                self._parts.replays.note(message)
            case Abort():
                self._spawn(self._abort(message), "abort")
            case Hello():
                self._parts = Parts(message, self._channel)
                self._spawn(self._serve(), "serve")
            case Stop():
                self._stopping.set()

    async def _serve(self) -> None:
        parts = self._parts
        config = parts.config
        if endpoint := config.gateway.otlp_endpoint:
            tracing.start(endpoint, config.name)
        context = Certificate(config.gateway.tls).context if config.gateway.tls.is_on else None
        back = await self._runner(parts.application(as_sent))
        await BackDoor(back, door_path(parts.folder, str(parts.index))).start()
        front = await self._runner(parts.application())
        self._front = HandedDoor(front, self._handed, context)
        await self._front.start()
        self._spawn(self._tell_progress(), "tell progress")
        self._spawn(self._tell_reports(), "tell reports")
        gc.collect()
        gc.freeze()
        self._channel.send(Ready())

    async def _runner(self, application: web.Application) -> web.AppRunner:
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def _abort(self, abort: Abort) -> None:
        try:
            await self._parts.abort(abort)
        except Exception as error:
            log.warning("an abort failed in a worker", error=repr(error))
        self._channel.send(Done(abort.call))

    async def _tell_progress(self) -> None:
        """Tell the owner which engines make tokens: it judges their standstills."""
        told_at = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            self._silent_ticks += 1
            if self._silent_ticks > _SILENT_TICKS:
                log.error("the gateway stands still")
                self._end()
            now, replicas = time.monotonic(), self._parts.fleet.replicas
            made = tuple(one.replica_id for one in replicas if one.evidence.answered_at >= told_at)
            told_at = now
            if made:
                self._channel.send(Progress(made))

    async def _tell_reports(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self._report()

    def _report(self) -> None:
        if (front := self._front) is not None:
            self._channel.send(Report(front.taken, front.num_connections, self._parts.metrics.counts()))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker's task has failed", exc_info=error)
            self._end()


async def _leave_to_owner(request: web.Request) -> NoReturn:
    """Leave a request of a session, whose record the owner has."""
    raise RunsElsewhere


async def _abort_nothing(kind: AbortKind, ids: tuple[str, ...], client: str | None) -> None:
    """Nothing: the owner answers the routes that abort."""
