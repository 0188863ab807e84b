"""Admission of sessions by the KV that they need: who waits, for how long, and what frees a place."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.engine import Engine
from engines.errors import EngineFailed
from gateway.config.schema import GatewayConfig
from gateway.fleet import pace
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement import scheduler, sessions, waiting
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.stories.played_fleet import PlayedFleet

NO_ENGINE = cast(Engine, SimpleNamespace())
CAPACITY = 1000
SHARE = 0.8


class PlayedClock:
    """Stands still unless a test moves `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@contextmanager
def played_clock() -> Iterator[PlayedClock]:
    clock = PlayedClock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (scheduler, sessions, waiting):
            patch.setattr(module, "time", clock)
        yield clock


@pytest.fixture
def clock() -> Iterator[PlayedClock]:
    with played_clock() as clock:
        yield clock


class Played:
    """A scheduler whose replicas hold 1000 tokens of KV, of which sessions may need 800.

    They read `step_tokens` of a prompt in the time of a step: with 0 no turn is worth reading a context again.
    """

    def __init__(self, num_replicas: int = 1, places: int = 128, step_tokens: float = 0.0, **gateway: Any) -> None:
        self.fleet = PlayedFleet([NO_ENGINE] * num_replicas, places)
        for replica in self.fleet.replicas:
            replica.residents.capacity = CAPACITY
            replica.residents.pace.step_tokens = step_tokens
        config = GatewayConfig(**{"session_kv_share": SHARE, "session_idle_s": 50.0, **gateway})
        self.scheduler = Scheduler(config, cast(Fleet, self.fleet), Metrics())
        self.reply = 0
        self.placed: list[str] = []
        self.where: dict[str, Replica] = {}
        self._running: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self._turns = 0

    async def begin(self, session: str, tokens: int, name: str = "", **fields: Any) -> str:
        """Ask for a turn with a prompt of so many tokens, and return its name."""
        self._turns += 1
        name = name or f"{session}-{self._turns}"
        rollout = Rollout(request_id=name, model="m", n=1, tokens=1, prompt_tokens=tokens, session=session, **fields)
        ended = asyncio.Event()
        self._running[name] = ended, asyncio.create_task(self._run(rollout, ended))
        await self.settled()
        return name

    async def _run(self, rollout: Rollout, ended: asyncio.Event) -> None:
        async def call(replica: Replica) -> None:
            self.placed.append(rollout.request_id)
            self.where[rollout.request_id] = replica
            await ended.wait()

        await self.scheduler.run(rollout, call)
        self.scheduler.delivered(rollout, rollout.prompt_tokens, self.reply)

    async def end(self, name: str) -> None:
        """End a turn that runs."""
        ended, task = self._running.pop(name)
        ended.set()
        await task
        await self.settled()

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def busy(self) -> None:
        """Load each replica so that it takes no session in another's place."""
        for number in range(len(self.fleet.replicas)):
            for part in range(4):
                await self.begin("", 0, name=f"load-{number}-{part}")
        await self.settled()

    async def turn(self, session: str, tokens: int) -> None:
        await self.end(await self.begin(session, tokens))

    def home(self, session: str) -> Replica:
        """The replica of a session's last turn."""
        home = self.scheduler.sessions.home("m", session)
        return next(replica for replica in self.fleet.replicas if replica.replica_id == home)

    @contextmanager
    def full(self, replica: Replica) -> Iterator[None]:
        """Leave a replica without room during the block."""
        left = replica.max_samples - replica.load_samples
        rollout = Rollout(request_id="full", model="m", n=left, tokens=1)
        replica.reserve(rollout)
        with replica.carrying(rollout):
            yield

    async def look(self) -> None:
        """Have the scheduler look at the line."""
        self.scheduler.open_gate("none")
        await self.settled()

    def task(self, name: str) -> "asyncio.Task[None]":
        return self._running[name][1]

    @property
    def waits(self) -> set[str]:
        return set(self._running) - set(self.placed)

    async def stop(self) -> None:
        for _, task in self._running.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)


async def resident(played: Played, clock: PlayedClock, session: str, tokens: int) -> None:
    """A session of two turns, which waits for its tool now. Tools take 10 s."""
    await played.turn(session, tokens)
    clock.now += 10.0
    await played.turn(session, tokens)


async def test_a_session_counts_while_it_waits_for_its_tool_and_others_wait_in_order(clock: PlayedClock) -> None:
    played = Played()
    await resident(played, clock, "first", 600)
    await played.busy()
    second, third = await played.begin("second", 300), await played.begin("third", 250)
    assert played.waits == {second, third}
    await played.turn("first", 650)
    assert played.waits == {second, third}, "it has come back, and stays"
    assert played.scheduler.finish_session("first")
    await played.settled()
    assert played.waits == {third}, "each counts with a share of the mean context, since it grows"
    await played.end(second)
    played.scheduler.finish_session("second")
    await played.settled()
    assert played.waits == set()
    assert not played.scheduler.finish_session("first")
    await played.stop()


async def test_rollouts_without_a_session_are_not_held(clock: PlayedClock) -> None:
    played = Played()
    await resident(played, clock, "first", 800)
    await played.busy()
    held = await played.begin("second", 300)
    free = await played.begin("", 900, name="batch")
    assert played.waits == {held}
    assert played.placed[-1] == free
    await played.stop()


async def test_a_replica_without_load_takes_a_session_in_place_of_an_idle_one(clock: PlayedClock) -> None:
    played = Played()
    await resident(played, clock, "first", 800)
    await played.turn("second", 300)
    assert played.waits == set()
    assert played.fleet.replicas[0].residents.tokens <= SHARE * CAPACITY
    await played.busy()
    again = await played.begin("first", 800)
    assert played.waits == {again}, "its KV may be gone"
    await played.stop()


@pytest.mark.parametrize(("step_tokens", "is_held"), [(70.0, True), (80.0, False)])
async def test_a_session_is_admitted_without_room_where_its_tokens_gain_more_than_half_a_context_costs(
    clock: PlayedClock, step_tokens: float, is_held: bool
) -> None:
    """A turn makes 16 tokens beside four samples, which gains four steps; 300 of 600 tokens are read again."""
    played = Played(step_tokens=step_tokens)
    played.reply = 16
    await resident(played, clock, "first", 584)
    await played.busy()
    second = await played.begin("second", 300)
    assert played.waits == ({second} if is_held else set())
    await played.stop()


async def test_small_sessions_of_another_demand_do_not_pass_a_large_one_for_ever(clock: PlayedClock) -> None:
    played = Played()
    await played.busy()
    running = [await played.begin(f"small-{number}", 250, max_staleness=5) for number in range(3)]
    large = await played.begin("large", 700)
    later = await played.begin("later", 250, max_staleness=5)
    for name in running:
        await played.end(name)
        played.scheduler.finish_session(name.rpartition("-")[0])
        await played.settled()
    assert played.waits == {later}
    await played.end(large)
    await played.stop()


async def test_a_turn_goes_elsewhere_after_a_failure_of_its_sessions_home(clock: PlayedClock) -> None:
    played = Played(2)
    await resident(played, clock, "first", 300)
    home, tried = played.home("first"), []

    async def call(replica: Replica) -> None:
        tried.append(replica)
        if replica is home:
            raise EngineFailed("failed", replica_id=replica.replica_id)

    turn = Rollout(request_id="turn", model="m", n=1, tokens=1, prompt_tokens=300, session="first")
    async with asyncio.timeout(20):
        await played.scheduler.run(turn, call)
    assert tried == played.fleet.replicas
    assert [len(replica.residents) for replica in played.fleet.replicas] == [0, 1]
    await played.stop()


async def test_a_session_that_has_begun_is_admitted_before_those_that_have_not(clock: PlayedClock) -> None:
    played = Played()
    await resident(played, clock, "first", 700)
    await resident(played, clock, "second", 700)
    await played.busy()
    new = await played.begin("new", 700)
    begun = await played.begin("first", 700)
    assert played.waits == {new, begun}
    played.scheduler.finish_session("second")
    await played.settled()
    assert played.waits == {new}
    await played.stop()


async def test_a_session_that_does_not_come_back_counts_no_more_after_three_times_a_tools_time(
    clock: PlayedClock,
) -> None:
    played = Played()
    await resident(played, clock, "first", 800)
    await played.busy()
    second = await played.begin("second", 300)
    clock.now += 29.0
    third = await played.begin("third", 300)
    assert played.waits == {second, third}
    clock.now += 2.0
    await played.begin("", 0, name="a look at the line")
    await played.settled()
    assert played.waits == {third}
    await played.stop()


async def test_sessions_of_one_turn_hold_nothing(clock: PlayedClock) -> None:
    played = Played()
    await played.busy()
    for number in range(20):
        await played.turn(f"single-{number}", 500)
    assert played.waits == set()
    await played.stop()


async def test_other_weights_end_the_use_of_idle_sessions(clock: PlayedClock) -> None:
    played = Played()
    await resident(played, clock, "first", 800)
    await played.busy()
    played.fleet.replicas[0].weight_version = 7
    await played.turn("second", 300)
    await played.stop()


async def test_a_lost_replica_takes_its_residents_with_it(clock: PlayedClock) -> None:
    played = Played(2)
    await resident(played, clock, "first", 800)
    home = next(replica for replica in played.fleet.replicas if len(replica.residents))
    played.fleet.replicas.remove(home)
    await played.busy()
    await played.turn("first", 800)
    assert played.fleet.replicas[0].residents.tokens == 800
    await played.stop()


@pytest.mark.parametrize("settings_", [{"session_kv_share": None}, {}])
async def test_nothing_is_held_where_admission_is_off_or_the_capacity_unknown(
    clock: PlayedClock, settings_: dict[str, Any]
) -> None:
    played = Played(**settings_)
    if not settings_:
        played.fleet.replicas[0].residents.capacity = None
    await resident(played, clock, "first", 5000)
    await played.busy()
    await played.turn("second", 5000)
    await played.stop()


async def test_time_that_a_session_waits_for_others_is_no_time_without_movement(clock: PlayedClock) -> None:
    played = Played(queue_timeout_s=0.05)
    await resident(played, clock, "first", 800)
    await played.busy()
    held = await played.begin("second", 300)
    clock.now += 20.0
    await asyncio.sleep(0.15)  # three times the timeout
    assert not played.task(held).done()
    played.scheduler.close_gate("test")
    clock.now += 20.0
    async with asyncio.timeout(20):
        with pytest.raises(Exception, match=r"gateway\.queue_timeout_s"):
            await played.task(held)
    await played.stop()


async def full_until_the_idle_limit() -> Played:
    """A replica whose KV a session holds for a second from now."""
    played = Played(session_idle_s=1.0)
    await played.turn("first", 800)
    await asyncio.sleep(0.04)
    await played.turn("first", 800)
    await played.busy()
    return played


async def test_a_line_of_sessions_moves_when_the_idle_limit_passes_though_nothing_else_happens() -> None:
    played = await full_until_the_idle_limit()
    held = await played.begin("second", 300)
    assert played.waits == {held}
    async with asyncio.timeout(20):
        while played.waits:
            await asyncio.sleep(0.01)
    await played.stop()


def steps() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    step = st.tuples(
        st.sampled_from(["begin", "end", "plain", "wait", "finish"]), st.integers(0, 7), st.integers(1, 900)
    )
    return st.lists(step, max_size=60)


@settings(max_examples=150)
@given(steps=steps(), step_tokens=st.sampled_from([0.0, 300.0, 1e9]))
def test_residents_fit_and_each_turn_runs_in_the_end(steps: list[tuple[str, int, int]], step_tokens: float) -> None:
    with played_clock() as clock:
        asyncio.run(_followed(steps, step_tokens, clock))


async def _followed(steps: list[tuple[str, int, int]], step_tokens: float, clock: PlayedClock) -> None:
    played = Played(2, places=64, step_tokens=step_tokens)
    for action, number, amount in steps:
        name = f"s{number}"
        running = [one for one in played.placed if one in played._running]
        if action == "begin" and not any(one.startswith(f"{name}-") for one in played._running):
            await played.begin(name, amount)
        elif action == "plain":
            await played.begin("", amount, name=f"plain-{len(played.placed)}-{amount}")
        elif action == "end" and running:
            await played.end(running[number % len(running)])
        elif action == "finish":
            played.scheduler.finish_session(name)
        else:
            clock.now += amount / 10
        await played.settled()
        _check(played)
    for _ in range(1000):
        running = [one for one in played.placed if one in played._running]
        if not played._running:
            break
        clock.now += 60.0
        await played.end(running[0])
        _check(played)
    assert not played._running, "no rollout starves"
    await played.stop()


def _check(played: Played) -> None:
    for replica in played.fleet.replicas:
        residents = replica.residents
        assert 0 <= residents.idle_tokens <= residents.tokens
        assert residents.tokens == sum(residents._tokens.values())
        assert residents.tokens <= CAPACITY or not residents.idle_tokens, "what waits for its tool makes room"
        assert replica.load_samples <= replica.max_samples
    assert not any(name.startswith("plain") for name in played.waits), "no session holds up others"


async def test_a_finished_session_is_known_once(rig: Rig) -> None:
    await rig.complete([5, 6, 7], session_id="agent")
    assert (await rig.post("/v1/sessions/agent/finish"))[0] == 200
    status, reply = await rig.post("/v1/sessions/agent/finish")
    assert status == 404
    assert "agent" in reply["error"]["message"]


async def test_a_key_ends_its_own_sessions_and_an_admin_key_any(start_rig: StartRig) -> None:
    keys = {"trusted_networks": [], "inference_keys": ["one", "two"], "admin_keys": ["boss"]}
    rig = await start_rig(1, gateway=keys)
    one, two, boss = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss"))

    async def turn(name: str, headers: Json) -> None:
        asked = {"prompt": [5, 6, 7], "max_tokens": 1, "session_id": name}
        assert (await rig.post("/v1/completions", asked, headers=headers))[0] == 200

    async def finish(name: str, headers: Json) -> int:
        return (await rig.post(f"/v1/sessions/{name}/finish", headers=headers))[0]

    await turn("mine", one)
    await turn("both", one)
    await turn("both", two)
    submitted = {"groups": [{"prompt": [5], "session_id": "submitted"}], "sampling": {"max_tokens": 1}}
    async with rig.client.post(rig.url + "/v1/rollouts", json=submitted, headers=one) as response:
        await response.read()
    assert [await finish("mine", headers) for headers in (two, boss, one)] == [404, 200, 404]
    assert [await finish("both", headers) for headers in (two, two, one, boss)] == [200, 404, 200, 404]
    assert [await finish("submitted", headers) for headers in (two, one)] == [404, 200]


async def test_the_capacity_is_the_engines_own_figure(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim={"kv_tokens": 4096})
    await rig.fleet.metrics_pages()
    assert rig.fleet.replicas[0].residents.capacity == 4096


async def test_the_pace_is_learned_from_the_engines_own_counters(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is read while turns run, as the gateway does every few seconds."""
    monkeypatch.setattr(pace, "_SHORTEST_S", 0.0)
    rig = await start_rig(1, gateway={"session_kv_share": 1.0})
    learned = rig.fleet.replicas[0].residents.pace

    async def turns(agent: int) -> None:
        turn = 0
        while learned.step_tokens == math.inf:
            turn += 1
            await rig.complete([agent, turn] * 32, session_id=f"agent-{agent}", max_tokens=20)

    async with asyncio.timeout(60), asyncio.TaskGroup() as agents:
        for agent in range(4):
            agents.create_task(turns(agent + 5))
        while learned.step_tokens == math.inf:
            await rig.fleet.metrics_pages()
            await asyncio.sleep(0.05)
    assert learned.step_tokens >= 0


@pytest.mark.parametrize("route", ["/reset_prefix_cache", "/pause?mode=keep&clear_cache=true"])
async def test_an_emptied_cache_holds_no_idle_session(start_rig: StartRig, route: str) -> None:
    rig = await start_rig(1, sim={"kv_tokens": 4096}, gateway={"session_kv_share": 0.8})
    await rig.fleet.metrics_pages()
    residents = rig.fleet.replicas[0].residents
    await rig.complete([5, 6, 7], session_id="agent")
    assert (len(residents), residents.idle_tokens > 0) == (1, True)
    assert (await rig.post(route))[0] == 200
    assert (len(residents), residents.tokens) == (0, 0)
