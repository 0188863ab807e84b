"""Rollouts of a worker, placed by its owner: both ends of the channel in this process, with a played fleet."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from engines.engine import Engine
from engines.errors import DeadlineExceeded, EngineFailed, EngineUnreachable, Withdrawn
from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement import attempt_loop
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from gateway.http.workers import link as link_module
from gateway.http.workers.channel import Channel
from gateway.http.workers.copied_fleet import CopiedFleet
from gateway.http.workers.link import Link
from gateway.http.workers.messages import (
    Changed,
    Done,
    FromOwner,
    FromWorker,
    Hello,
    Joined,
    Judged,
    Lengths,
    NotPlaced,
    Placed,
    Progress,
    Ready,
    Sync,
    Versions,
    Withdraw,
)
from gateway.http.workers.remote_scheduler import RemoteScheduler
from tests.rigs.stories.played_fleet import DIED, PlayedFleet

CONFIG = Config.model_validate({"engine": {"kind": "sim", "model": "m"}})


class _Engine:
    """Stands where an engine's client does."""

    replica_id = "engine"

    async def close(self) -> None:
        return


class _World:
    """An owner with a scheduler over played replicas, and the placing of one worker."""

    def __init__(self, replicas: int = 2, places: int = 4, **gateway: Any) -> None:
        self.fleet = PlayedFleet([cast(Engine, _Engine()) for _ in range(replicas)], places=places)
        self.metrics = Metrics()
        config = CONFIG.gateway.model_copy(update=gateway)
        self.scheduler = Scheduler(config, cast(Fleet, self.fleet), self.metrics)
        self.killed = asyncio.Event()
        self.learned: list[tuple[str, int]] = []
        self.link = Link(
            0,
            cast(Fleet, self.fleet),
            self.scheduler,
            kill=self.killed.set,
            learned=lambda *one: self.learned.append(one),
            served=lambda: None,
            has_batches=lambda _: None,
        )
        self.channel: Channel[FromWorker, FromOwner] = Channel(FromOwner, self._received, lambda: None)
        self.remote = RemoteScheduler(config, self.channel.send)
        self.remote.fleet = self.copies = CopiedFleet(
            CONFIG, connect=lambda info: cast(Engine, _Engine()), examine=self.remote.examine
        )
        self.is_deaf = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator["_World"]:
        ours, theirs = socket.socketpair()
        hands, takes = socket.socketpair()
        await self.channel.open(theirs)
        await self.link.open(ours, hands, Hello(b"", 0, ""))
        self.channel.send(Ready())
        await self.until(lambda: self.link.ready.is_set() and len(self.copies.replicas) == len(self.fleet.replicas))
        try:
            yield self
        finally:
            self.channel.close()
            await self.until(self.link.ended.is_set)
            takes.close()

    def _received(self, message: FromOwner) -> None:
        match message:
            case Placed():
                self.remote.answer(message.turn, self.copies.copy_of(message.replica_id))
            case NotPlaced():
                self.remote.answer(message.turn, message.failure)
            case Judged():
                self.remote.answer(message.turn, message.is_dead)
            case Joined():
                self.copies.join(message)
            case Changed():
                self.copies.change(message)
            case Versions():
                self.copies.note(message)
            case Withdraw():
                self.remote.withdraw(lambda rollout: rollout.model == message.model)
            case Lengths():
                for model, key, tokens in message.lengths:
                    self.remote.lengths.set(model, key, tokens)
            case Sync() if not self.is_deaf:
                self.channel.send(Done(message.call))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.001)

    @property
    def loads(self) -> list[tuple[int, int]]:
        return [(replica.load_samples, replica.load_tokens) for replica in self.fleet.replicas]

    @property
    def is_free(self) -> bool:
        return not any(samples or tokens for samples, tokens in self.loads) and not self.scheduler.queue_length("m")

    def run(self, name: str, call: Callable[[Replica], Any], **of_rollout: Any) -> "asyncio.Task[Any]":
        rollout = Rollout(request_id=name, model="m", n=1, tokens=10, **of_rollout)
        return asyncio.create_task(self.remote.run(rollout, call, lambda _: False))

    async def held(self, name: str) -> tuple["asyncio.Task[Any]", asyncio.Event]:
        """A rollout that runs until the event is set."""
        begun, end = asyncio.Event(), asyncio.Event()

        async def call(replica: Replica) -> str:
            begun.set()
            await end.wait()
            return replica.replica_id

        task = self.run(name, call)
        async with asyncio.timeout(20):
            await begun.wait()
        return task, end


async def _answered(replica: Replica) -> str:
    return replica.replica_id


async def test_an_attempt_holds_its_room_in_the_owner_until_it_ends() -> None:
    async with _World().running() as world:
        first, end_first = await world.held("a")
        second, end_second = await world.held("b")
        assert world.loads == [(1, 10), (1, 10)]
        end_first.set()
        end_second.set()
        assert {await first, await second} == {"engine-0", "engine-1"}
        await world.until(lambda: world.is_free and not world.link.num_rollouts)


async def test_a_client_that_leaves_frees_what_its_rollout_holds_or_its_place_in_the_line() -> None:
    async with _World(replicas=1, places=2).running() as world:
        held = [await world.held(name) for name in "ab"]
        waiting = world.run("c", _answered)
        await world.until(lambda: world.scheduler.queue_length("m") == 1)
        for task in (waiting, held[0][0], held[1][0]):
            task.cancel()
        await asyncio.gather(waiting, *(task for task, _ in held), return_exceptions=True)
        await world.until(lambda: world.is_free)
        assert [life["attempts"][0]["end"] for name in "abc" for life in world.scheduler.history.of(name)] == [
            "given up by the client"
        ] * 3


async def test_a_withdrawal_ends_what_waits_and_what_is_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = asyncio.Event()

    async def call(replica: Replica) -> str:
        failing.set()
        raise EngineFailed("500", replica_id=replica.replica_id)

    async def judged(*_: object) -> bool:
        await asyncio.Event().wait()
        return False

    async with _World(replicas=1, places=2).running() as world:
        monkeypatch.setattr(world.scheduler, "judged", judged)
        between = world.run("a", call)
        await failing.wait()
        await world.until(lambda: world.is_free)
        world.scheduler.close_gate("test")
        waiting = world.run("b", _answered)
        await world.until(lambda: world.scheduler.queue_length("m") == 1)
        world.scheduler.withdraw_policy()
        world.link.tell(Withdraw("m"))
        await world.link.taken()
        with pytest.raises(Withdrawn):
            await waiting
        monkeypatch.undo()
        for turn in world.link._turns:
            world.link._channel.send(Judged(turn, False))
        with pytest.raises(Withdrawn):
            await between


async def test_a_worker_that_does_not_answer_is_killed_and_the_update_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_TAKEN_WITHIN_S", 0.05)
    async with _World().running() as world:
        world.is_deaf = True
        taken = asyncio.create_task(world.link.taken())
        async with asyncio.timeout(20):
            await world.killed.wait()
        assert not taken.done(), "it may deliver until it has ended"
        world.channel.close()
        async with asyncio.timeout(20):
            await taken


async def test_the_owner_judges_a_standstill_by_what_all_workers_have_seen() -> None:
    async with _World().running() as world:
        task, end = await world.held("a")
        (busy,) = [replica for replica in world.fleet.replicas if replica.load_samples]
        before = busy.evidence.answered_at
        world.channel.send(Progress((busy.replica_id,)))
        await world.until(lambda: busy.evidence.answered_at > before)
        end.set()
        await task


@pytest.mark.parametrize(
    ("prompt", "completion", "told"),
    [
        (3, 5, (3, 5)),
        (3.0, 5.0, (3, 5)),
        (True, 5, (1, 5)),
        ("x", 5, None),
        ([], 5, None),
        (3, float("inf"), None),
        (3, 1 << 70, None),
    ],
)
async def test_odd_counts_of_an_engine_break_no_channel(
    prompt: Any, completion: Any, told: tuple[int, int] | None
) -> None:
    async with _World().running() as world:
        learned: list[tuple[int, int]] = []
        world.scheduler.delivered = lambda _, *counts: learned.append(counts)  # type: ignore[method-assign]
        rollout = Rollout(request_id="a", model="m", n=1, tokens=10)
        world.remote.delivered(rollout, prompt, completion)
        assert await world.run("b", _answered)  # what was sent before has come
        assert learned == ([] if told is None else [told])
        assert not world.link.ended.is_set()


async def test_the_owner_draws_the_conclusions_from_attempts_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_loop, "_AFTER_DEATH_S", 0.0)
    tried: list[str] = []

    async def call(replica: Replica) -> str:
        tried.append(replica.replica_id)
        if len(tried) == 1:
            raise EngineUnreachable(DIED, replica_id=replica.replica_id)
        return replica.replica_id

    async with _World().running() as world:
        assert await world.run("a", call) == tried[1]
        assert tried[0] != tried[1], "a replica that failed is avoided"
        assert world.metrics.retries.labels("failed")._value.get() == 1
        await world.until(lambda: world.is_free)
        (life,) = world.scheduler.history.of("a")
        assert [attempt["end"] for attempt in life["attempts"]] == ["failed", "answered"]


async def test_the_owners_bound_of_the_wait_ends_a_rollout_with_its_words() -> None:
    async with _World(queue_timeout_s=0.05).running() as world:
        world.scheduler.close_gate("test")
        with pytest.raises(DeadlineExceeded, match="the gate is closed for: test"):
            await world.run("a", _answered)
