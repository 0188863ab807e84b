"""The owner's end of one worker: runs its rollouts' placing here, and tells it what happens to the fleet."""

import asyncio
import math
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any

import structlog

from engines.errors import DeadlineExceeded, EngineError, EngineGone, EngineUnreachable, RolloutGatewayError
from engines.trace_context import TRACE_CONTEXT, TRACEPARENT
from engines.types import ReplicaState
from gateway.fleet.changes import Argument
from gateway.fleet.concurrency import is_set_within
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempts import End
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from gateway.http.own_requests import AbortKind
from gateway.http.workers.channel import Channel
from gateway.http.workers.failures import packed, unpacked, writable
from gateway.http.workers.messages import (
    Abort,
    Asked,
    Batches,
    Changed,
    Crew,
    Delivered,
    Done,
    Examine,
    FromOwner,
    FromWorker,
    Gone,
    Hello,
    Joined,
    Judge,
    Judged,
    Left,
    Lengths,
    NotPlaced,
    Over,
    Place,
    Placed,
    Progress,
    Ready,
    Report,
    Stop,
    Sync,
    Versions,
    Withdraw,
)

log = structlog.get_logger()

# A worker that has not dealt with its messages for so long stands still, and is ended: an update waits for it. Ticks
# of this process are counted, since it may have stood still itself.
_TAKEN_WITHIN_S = 10.0
_TICK_S = 0.25
_ENDS_WITHIN_S = 5.0


class _Turn:
    """A rollout's run. `holds` is True from a request for a place to the end of its attempt on `replica`."""

    def __init__(self) -> None:
        self.holds = True
        self.replica: Replica | None = None
        self.messages: asyncio.Queue[Place | Left | Judge | Over] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class Link:
    """One worker process, from its start to its end. A follower of the fleet's changes."""

    def __init__(
        self,
        index: int,
        fleet: Fleet,
        scheduler: Scheduler,
        *,
        kill: Callable[[], None],
        learned: Callable[[str, int], None],
        served: Callable[[], None],
        has_batches: Callable[[Batches], None],
    ) -> None:
        """`kill` ends the process at once. `learned` is called with model and prompt of a new expected length, `served`
        when the worker begins to serve, and `has_batches` with those that begin and end in it."""
        self.index = index
        self.ready = asyncio.Event()
        """Set once it serves."""
        self.ended = asyncio.Event()
        """Set once the channel has ended: what the worker held is given back."""
        self.report = Report(0, 0, [])
        self.heard_at = time.monotonic()
        self._fleet = fleet
        self._scheduler = scheduler
        self.kill = kill
        self._learned = learned
        self._served = served
        self._has_batches = has_batches
        self._channel: Channel[FromOwner, FromWorker] = Channel(FromWorker, self._received, self._has_ended)
        self._turns: dict[int, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replicas: dict[str, Replica] = {}
        self._hands: socket.socket
        self._handed = 0
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)

    @property
    def num_rollouts(self) -> int:
        """Rollouts that run in the worker, or wait for a replica."""
        return len(self._turns)

    @property
    def num_connections(self) -> int:
        """Connections of clients: those that were open at the last report, and those handed over that it had not
        taken yet."""
        return self.report.connections + self._handed - self.report.taken

    def hand(self, connection: socket.socket) -> None:
        """Hand a client's connection to the worker. Raise `OSError` where it cannot take it."""
        socket.send_fds(self._hands, [b"c"], [connection.fileno()])
        self._handed += 1

    async def open(self, end: socket.socket, hands: socket.socket, hello: Hello) -> None:
        """Begin: the worker gets its configuration and the fleet as it is, and each change from here on.

        Connections go over `hands`. Both sockets belong to the link from now on.
        """
        self._hands = hands
        hands.setblocking(False)
        await self._channel.open(end)
        self._channel.send(hello)
        self._fleet.changes.follow(self)
        for replica in self._fleet.replicas:
            self.joined(replica)
        self.versions()
        self._channel.send(Lengths(self._scheduler.lengths.all()))

    def tell(self, message: Crew | Batches | Lengths | Withdraw | Versions) -> None:
        self._channel.send(message)

    async def abort(self, kind: AbortKind, ids: tuple[str, ...], client: str | None) -> None:
        """End requests in the worker."""
        if self.ready.is_set():
            await self._called(lambda number: Abort(number, kind, ids, client), is_barrier=False)

    def stop(self) -> None:
        """Have the worker end; replies that are under way have some seconds."""
        self._channel.send(Stop())
        self._channel.flush()

    # Follower

    def joined(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica
        info = replace(replica.info, tensors=None, model_config="")
        self._channel.send(
            Joined(
                info, replica.frozen, replica.state, writable(replica.reason), replica.weight_version, replica.cuts_off
            )
        )

    def left(self, replica: Replica) -> None:
        del self._replicas[replica.replica_id]
        self._channel.send(Gone(replica.replica_id))

    def changed(self, replica: Replica, change: str, arguments: tuple[Argument, ...]) -> None:
        if self._replicas.get(replica.replica_id) is replica:
            told = tuple(writable(one) if type(one) is str else one for one in arguments)
            self._channel.send(Changed(replica.replica_id, change, told))

    def versions(self) -> None:
        self._channel.send(Versions(self._fleet.version, self._fleet.update_to, self._fleet.rolling_to))

    async def taken(self) -> None:
        """Return once the worker has done all that it was told. One that has not begun to serve does so in time."""
        if self.ready.is_set():
            await self._called(Sync)

    async def _called(self, message: Callable[[int], FromOwner], *, is_barrier: bool = True) -> None:
        """Return once the worker has answered, or has ended: one that does not answer a barrier in time is ended."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._channel.send(message(number))
        self._channel.flush()
        try:
            if await _is_done(answer):
                return
            if not is_barrier:  # it waits for an engine that does not answer
                log.warning("an abort takes long in a worker", worker=self.index, seconds=_TAKEN_WITHIN_S)
                return
            log.error("a worker does not answer, and is ended", worker=self.index, seconds=_TAKEN_WITHIN_S)
            self.kill()
            if not await is_set_within(self.ended, _ENDS_WITHIN_S):
                raise DeadlineExceeded(f"worker {self.index} of the gateway does not end")
        finally:
            self._calls.pop(number, None)

    # From the worker

    def _received(self, message: FromWorker) -> None:
        self.heard_at = time.monotonic()
        match message:
            case Place() if message.turn not in self._turns:
                self._begin(message)
            case Place() | Left() | Judge():
                if (turn := self._turns.get(message.turn)) is not None:
                    turn.holds = isinstance(message, Place)
                    turn.messages.put_nowait(message)
            case Over():
                self._end(message)
            case Delivered():
                self._deliver(message)
            case Progress():
                self._note(message)
            case Examine():
                self._spawn(self._examine(message), f"examine for worker {self.index}")
            case Batches():
                self._has_batches(Batches(self.index, message.begun, message.ended))
            case Done():
                if (answer := self._calls.get(message.call)) is not None and not answer.done():
                    answer.set_result(None)
            case Report():
                self.report = message
            case Ready():
                self.ready.set()
                self._served()

    def _begin(self, place: Place) -> None:
        if place.asked is None:
            return  # its turn has ended here for an error, and the answer is on its way
        turn = self._turns[place.turn] = _Turn()
        turn.messages.put_nowait(place)
        turn.task = self._spawn(self._serve(place.turn, turn, _rollout_of(place.asked)), f"place for {self.index}")

    def _end(self, over: Over) -> None:
        turn = self._turns.pop(over.turn, None)
        if turn is None or turn.task is None:
            return
        if turn.holds:
            turn.task.cancel()
        else:
            turn.messages.put_nowait(over)

    async def _serve(self, number: int, turn: _Turn, rollout: Rollout) -> None:
        """Make the attempts of a turn, as `AttemptLoop.run` does; the calls of engines are in the worker."""
        try:
            while not isinstance(message := await turn.messages.get(), Over):
                if isinstance(message, Place):
                    await self._attempt(turn, rollout, message)
                elif isinstance(message, Judge):
                    await self._judge(turn, rollout, message)
        except Exception as error:
            if not isinstance(error, RolloutGatewayError):
                log.exception("placing failed in a way that was not foreseen", request=rollout.request_id)
            self._turns.pop(number, None)
            self._channel.send(NotPlaced(number, packed(error)))

    async def _attempt(self, turn: _Turn, rollout: Rollout, place: Place) -> None:
        """Place the rollout, and hold its place until the worker's attempt has ended."""
        rollout.attempts.avoid = frozenset(place.avoid)
        if place.traceparent:
            TRACE_CONTEXT.set({TRACEPARENT: place.traceparent})
        is_told = False
        while not is_told:
            try:
                async with self._scheduler.placed(rollout) as replica:
                    if replica.state is ReplicaState.LOST:  # in the moment in which it was chosen
                        raise EngineUnreachable(f"given up: {replica.reason}", replica_id=replica.replica_id)
                    is_told, turn.replica = True, replica
                    self._channel.send(Placed(place.turn, replica.replica_id))
                    replica.prompts.has_read(
                        rollout
                    )  # a worker does not tell of first tokens: its rests are not spread
                    left = await turn.messages.get()
                    if isinstance(left, Left) and left.failure is not None:
                        raise unpacked(left.failure)
                    replica.backoff.succeeded()
                    replica.evidence.saw_progress()
            except EngineUnreachable:
                pass  # the worker's own, or it is placed again
            except RolloutGatewayError:
                if not is_told:
                    raise

    async def _judge(self, turn: _Turn, rollout: Rollout, judge: Judge) -> None:
        error = unpacked(judge.failure)
        assert isinstance(error, EngineError)
        assert turn.replica is not None
        is_dead = await self._scheduler.judged(rollout, turn.replica, End(judge.end), error)
        self._channel.send(Judged(judge.turn, is_dead))

    async def _examine(self, examine: Examine) -> None:
        error, replica = unpacked(examine.failure), self._replicas.get(examine.replica_id)
        assert isinstance(error, EngineError)
        is_dead = isinstance(error, EngineGone)
        try:
            if replica is not None:
                is_dead = await self._fleet.examine(replica, error)
        finally:  # the worker waits for it
            self._channel.send(Judged(examine.turn, is_dead))

    def _deliver(self, told: Delivered) -> None:
        rollout = Rollout(
            request_id="", model=told.model, n=told.n, tokens=0, session=told.session, prompt_key=told.prompt_key
        )
        self._scheduler.delivered(rollout, told.prompt_tokens, told.completion_tokens)
        if told.prompt_key:
            self._learned(told.model, told.prompt_key)

    def _note(self, progress: Progress) -> None:
        for replica_id in progress.replicas:
            if (replica := self._replicas.get(replica_id)) is not None:
                replica.evidence.saw_progress()

    def _has_ended(self) -> None:
        """Free all that the worker holds. It delivers nothing from here on."""
        self.kill()
        self.ready.clear()
        self._hands.close()
        self._fleet.changes.unfollow(self)
        self._turns.clear()
        for task in self._tasks:
            task.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(None)
        self.ended.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _is_done(answer: "asyncio.Future[None]") -> bool:
    """Wait for an answer; False where none comes in time."""
    for _ in range(math.ceil(_TAKEN_WITHIN_S / _TICK_S)):
        if (await asyncio.wait([answer], timeout=_TICK_S))[0]:
            return True
    return False


def _rollout_of(asked: Asked) -> Rollout:
    return Rollout(
        request_id=asked.request_id,
        model=asked.model,
        n=asked.n,
        tokens=asked.tokens,
        min_version=asked.min_version,
        max_staleness=asked.max_staleness,
        session=asked.session,
        goes_on=asked.goes_on,
        needs_ids=asked.needs_ids,
        needs_route=asked.needs_route,
        prompt_tokens=asked.prompt_tokens,
        request=asked.request,
        owner=asked.owner,
        priority=asked.priority,
        expected=asked.expected,
        prompt_key=asked.prompt_key,
    )
