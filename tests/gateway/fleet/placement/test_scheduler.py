"""The order in which rollouts are placed, and the work that placing them costs."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.engine import Engine
from engines.errors import DeadlineExceeded
from gateway.config.schema import GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement import scheduler, waiting
from gateway.fleet.placement.attempts import Attempts
from gateway.fleet.placement.routing import Rollout, has_room
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.placement.waiting import Queue, Waiter, WaitingLine
from gateway.fleet.replica import Replica
from gateway.fleet.watch import evidence
from tests.rigs.calls import until
from tests.rigs.stories.played_fleet import PlayedFleet

MANY = 4000
NO_ENGINE = cast(Engine, SimpleNamespace())


class Played:
    """A scheduler over a played fleet. Rollouts run until `end`; `placed` has their ids in order."""

    def __init__(self, num_replicas: int, places: int = 2, **gateway: Any) -> None:
        self.fleet = PlayedFleet([NO_ENGINE] * num_replicas, places)
        self.scheduler = Scheduler(GatewayConfig(**gateway), cast(Fleet, self.fleet), Metrics())
        self.placed: list[str] = []
        self.where: dict[str, str] = {}
        self.rollouts: dict[str, Rollout] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def submit(self, request_id: str, **fields: Any) -> None:
        """Place a rollout, or have it wait."""
        rollout = Rollout(request_id=request_id, model="m", **{"n": 1, "tokens": 1, **fields})
        self.rollouts[request_id] = rollout
        self.tasks.append(asyncio.create_task(self._run(rollout)))
        await self.settled()

    async def _run(self, rollout: Rollout) -> None:
        async def call(replica: Replica) -> None:
            self.placed.append(rollout.request_id)
            self.where[rollout.request_id] = replica.replica_id
            await self._ends.setdefault(rollout.request_id, asyncio.Event()).wait()

        await self.scheduler.run(rollout, call, lambda _: False)

    async def end(self, *request_ids: str) -> None:
        """End running rollouts, and let the places that they leave be taken."""
        for request_id in request_ids:
            self._ends[request_id].set()
        await self.settled()

    @property
    def running(self) -> list[str]:
        """Ids in the order of their placement."""
        return [name for name in self.placed if not self._ends[name].is_set()]

    async def settled(self) -> None:
        """Let the line be looked at, and those that it places begin."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of waiting rollouts that were looked at."""
    counted: Counter[str] = Counter()
    in_turn = WaitingLine.in_turn

    def counting(line: WaitingLine, skipped: Container[Queue]) -> Iterator[Waiter]:
        for waiter in in_turn(line, skipped):
            counted["looks"] += 1
            yield waiter

    monkeypatch.setattr(WaitingLine, "in_turn", counting)
    return counted


@pytest.mark.parametrize("num_replicas", [2, 256])
async def test_a_placement_looks_at_as_many_waiters_whatever_the_fleet_and_the_line(
    looks: Counter[str], num_replicas: int
) -> None:
    played = Played(num_replicas)
    for number in range(2 * num_replicas):
        await played.submit(f"running-{number}")
    for number in range(MANY):
        await played.submit(f"waiting-{number}", request="batch")
    assert played.scheduler.queue_length("m") == MANY
    looks.clear()
    for number in range(4):
        await played.end(f"running-{number}")
    assert played.placed[2 * num_replicas :] == [f"waiting-{number}" for number in range(4)]
    assert looks["looks"] <= 3 * 4  # the rollout that is placed, and the next, for which there is no room
    await played.stop()


class PlayedClock:
    """Stands still unless a test moves `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


async def test_time_in_the_line_counts_only_while_no_rollout_of_the_demand_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = PlayedClock()
    for module in (scheduler, waiting):
        monkeypatch.setattr(module, "time", clock)
    played = Played(1, queue_timeout_s=0.05)
    for number in range(2):
        await played.submit(f"running-{number}")
    for number in range(5):
        await played.submit(f"waiting-{number}")
    await played.submit("ahead", min_version=7)
    for request_id in ("running-0", "running-1", "waiting-0", "waiting-1"):
        clock.now += 0.04  # of 0.05
        await played.end(request_id)
    assert played.placed[2:] == [f"waiting-{number}" for number in range(4)]
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded, match="demands version 7"):
            await played.tasks[-1]
    assert not played.tasks[-2].done(), "it has waited for 0.16 s, in which others moved"
    clock.now += 0.06
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded, match=r"took the rollout within 0\.05 s"):
            await played.tasks[-2]
    await played.stop()


async def test_a_rollout_waits_for_as_long_as_replicas_that_could_take_it_make_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = PlayedClock()
    for module in (scheduler, waiting, evidence):
        monkeypatch.setattr(module, "time", clock)
    played = Played(1, queue_timeout_s=0.05)
    for name in ("running-0", "running-1", "waiting"):
        await played.submit(name)
    for _ in range(3):
        clock.now += 10.0
        played.fleet.replicas[0].evidence.saw_progress()
        await asyncio.sleep(0.1)  # twice the time after which the rollout looks again
        assert not played.tasks[-1].done()
    clock.now += 10.0
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded, match="took the rollout"):
            await played.tasks[-1]
    await played.stop()


async def test_the_rest_of_what_has_begun_is_placed_before_what_has_not() -> None:
    played = Played(1)
    played.scheduler.close_gate("test")
    for name, goes_on in (("first", False), ("second", False), ("rest", True)):
        await played.submit(name, goes_on=goes_on)
    assert played.placed == []
    played.scheduler.open_gate("test")
    await played.end()
    assert played.placed == ["rest", "first"]
    await played.stop()


def rest(prompt_tokens: int) -> Any:
    return {"goes_on": True, "prompt_tokens": prompt_tokens}


async def with_own(number: int = 8, engines: int = 1) -> Played:
    """Return a scheduler of replicas that have rollouts of their own."""
    played = Played(engines, places=100)
    for name in range(number):
        await played.submit(f"own-{name}")
    return played


async def test_rests_wait_until_the_engine_has_read_all_of_those_before_and_the_shortest_is_first() -> None:
    played = await with_own()
    for name, prompt_tokens in (("a", 4000), ("b", 3000), ("long", 1800), ("short", 1400), ("shorter", 1200)):
        await played.submit(name, **rest(prompt_tokens))
    assert played.placed[8:] == ["a", "b"]
    (replica,) = played.fleet.replicas
    replica.heard(played.rollouts["own-0"])
    await played.settled()
    assert played.placed[8:] == ["a", "b"]
    replica.heard(played.rollouts["a"])
    await played.settled()
    assert played.placed[8:] == ["a", "b"]
    await played.end("b")
    await until(lambda: len(played.placed) > 10)
    assert played.placed[10:] == ["shorter", "short", "long"]
    await played.stop()


@pytest.mark.parametrize("engines", [1, 3])
async def test_what_has_not_begun_waits_while_each_engine_has_rests_to_read(engines: int) -> None:
    played = await with_own(8 * engines, engines)
    names = [f"rest-{number}" for number in range(engines + 1)]
    for name in names:
        await played.submit(name, **rest(7000))
    await played.submit("new")
    assert played.placed[8 * engines :] == names[:-1]
    one = played.fleet.find(played.where["rest-0"])
    assert one is not None
    one.heard(played.rollouts["rest-0"])
    await until(lambda: "new" in played.where)
    assert played.placed[8 * engines :] == [*names, "new"]
    await played.stop()


async def test_a_rollout_whose_engine_was_lost_is_placed_and_read_as_a_rest() -> None:
    played = await with_own()
    for name, prompt_tokens in (("a", 7000), ("b", 10)):
        await played.submit(name, **rest(prompt_tokens))
    lost = Attempts(avoid=frozenset({"another"}))
    await played.submit("lost", attempts=lost, prompt_tokens=5)
    assert played.placed[8:] == ["a"]
    await played.end("a")
    await until(lambda: len(played.placed) > 9)
    assert played.placed[8:] == ["a", "lost", "b"]
    await played.stop()


@pytest.mark.parametrize(("samples", "all_at_once"), [(1, True), (8, False)])
async def test_rests_are_not_held_back_where_an_engine_has_no_more_samples_of_its_own(
    samples: int, all_at_once: bool
) -> None:
    played = Played(1, places=100)
    for number in range(3):
        await played.submit(f"own-{number}", n=samples)
    for number in range(8):
        await played.submit(f"rest-{number}", **rest(3000))
    assert len(played.placed) == 3 + (8 if all_at_once else 3)
    await played.stop()


async def test_an_engine_that_has_read_its_rests_is_one_with_rollouts_of_its_own() -> None:
    played = Played(1, places=100)
    for number in range(8):
        await played.submit(f"rest-{number}", **rest(3000))
    assert len(played.placed) == 8
    for name in list(played.placed):
        played.fleet.replicas[0].heard(played.rollouts[name])
    for number in range(8):
        await played.submit(f"later-{number}", **rest(3000))
    assert len(played.placed) == 8 + 3
    await played.stop()


@pytest.mark.parametrize("tells", [True, False])
async def test_a_slow_engine_that_tells_its_first_tokens_is_waited_for(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.replica._TOLD_WITHIN_S", 0.0)
    played = Played(1, places=100)
    played.fleet.replicas[0].info = replace(played.fleet.replicas[0].info, streams=tells)
    for number in range(8):
        await played.submit(f"own-{number}")
    for name in ("first", "second"):
        await played.submit(name, **rest(500_000))
    if tells:
        await asyncio.sleep(0.05)
        assert played.placed[8:] == ["first"]
    else:
        await until(lambda: played.placed[8:] == ["first", "second"])
    await played.stop()


@pytest.mark.parametrize("progressed", [True, False])
async def test_the_successor_of_an_engine_that_died_takes_a_rest_but_no_prompt_that_may_have_killed_it(
    progressed: bool,
) -> None:
    played, attempts = Played(2, places=100), Attempts()
    await played.submit("own", tokens=50)
    other, one = played.fleet.replicas
    attempts.failed(one.replica_id, one.info.incarnation, died=True, progressed=progressed)
    one.info = replace(one.info, incarnation="its successor")
    await played.submit("lost", attempts=attempts)
    assert played.where["lost"] == (one if progressed else other).replica_id
    await played.stop()


async def test_rests_are_left_to_a_standby_that_wakes_and_other_rollouts_are_placed_meanwhile() -> None:
    played = Played(1, places=100)
    for number in range(8):
        await played.submit(f"own-{number}")
    (replica,) = played.fleet.replicas
    replica.prompts.leave_rests(4)
    for number in range(5):
        await played.submit(f"rest-{number}", **rest(10))
    await played.submit("new")
    assert played.placed[8:] == ["rest-0", "rest-1", "new"]
    replica.prompts.take_rests()
    await played.end("new")
    assert played.placed[11:] == ["rest-4", "rest-3", "rest-2"]  # the last of equal length is first
    await played.stop()


async def test_rests_do_not_wait_for_an_engine_that_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.replica._TOLD_WITHIN_S", 0.01)
    monkeypatch.setattr("gateway.fleet.replica._SLOW_TOKENS_PER_S", 1e6)
    played = await with_own()
    for name in ("first", "second"):
        await played.submit(name, **rest(9000))
    await until(lambda: "second" in played.placed)
    await played.stop()


async def test_the_longest_of_a_turn_is_placed_first_and_a_later_turn_waits() -> None:
    played = Played(1)
    for number in range(2):
        await played.submit(f"running-{number}")
    for name, expected in (("short", 10.0), ("long", 900.0), ("middle", 300.0), ("unknown", None), ("equal", 300.0)):
        await played.submit(name, expected=expected)
    await played.end("running-0")
    await played.submit("late", expected=5000.0)
    for place in range(1, 6):
        await played.end(played.placed[place])
    assert played.placed[2:] == ["unknown", "long", "middle", "equal", "short", "late"]
    await played.stop()


lengths = st.none() | st.integers(1, 50)


@given(arrivals=st.lists(st.tuples(st.integers(0, 3), lengths, st.integers(0, 2)), min_size=1, max_size=40))
def test_no_rollout_waits_for_more_than_its_turn_and_equals_keep_their_order(
    arrivals: list[tuple[int, int | None, int]],
) -> None:
    """Each arrival is a request, a length, and the placements that follow it."""
    asyncio.run(_placed_in_turns(arrivals))


arrivals = st.fixed_dictionaries({"n": st.sampled_from([1, 1, 2, 3, 4, 6]), "expected": st.none() | st.integers(1, 2)})
ends = st.integers(0, 20)


@settings(max_examples=60)
@given(steps=st.lists(arrivals | ends, max_size=40))
def test_replicas_keep_to_their_room_the_first_in_line_takes_it_and_each_rollout_runs(
    steps: list[dict[str, Any] | int],
) -> None:
    asyncio.run(_played(steps))


async def _played(steps: list[dict[str, Any] | int]) -> None:
    """Each step is a rollout that comes, or the place of one that ends among those that run."""
    played, kinds = Played(3, places=4), dict[str, tuple[Any, ...]]()
    for number, step in enumerate(steps):
        if isinstance(step, dict):
            kinds[f"{number}"] = tuple(step.values())
            await played.submit(f"{number}", tokens=step["n"], **step)
        elif running := played.running:
            await played.end(running[step % len(running)])
        _check_room(played)
    await played.submit("large", n=4, tokens=4)
    for number in range(60):  # small rollouts come as long as it waits
        await played.submit(f"small-{number}")
        await played.end(played.running[0])
        _check_room(played)
    assert "large" in played.placed
    while running := played.running:
        await played.end(running[0])
        _check_room(played)
    await asyncio.gather(*played.tasks)
    assert not any(replica.load_samples or replica.load_tokens for replica in played.fleet.replicas)
    placed = [name for name in played.placed if name in kinds]
    for one, other in itertools.combinations(placed, 2):
        if kinds[one] == kinds[other]:
            assert int(one) < int(other), "equals keep their order"


def _check_room(played: Played) -> None:
    replicas = played.fleet.replicas
    for replica in replicas:
        mine = [name for name in played.running if played.where[name] == replica.replica_id]
        assert replica.load_samples <= replica.max_samples or len(mine) == 1, "a large group runs alone"
    if waiters := played.scheduler._lines["m"].waiters():
        first = min(waiters, key=lambda waiter: waiter.order)
        assert not any(has_room(first.rollout, replica) for replica in replicas), "the first in line takes what is free"


async def _placed_in_turns(arrivals: list[tuple[int, int | None, int]]) -> None:
    line, placed = WaitingLine(), list[Waiter]()

    def place() -> None:
        for waiter in line.in_turn(()):
            line.place(waiter, cast(Replica, None))
            placed.append(waiter)
            return

    for number, (request, length, placements) in enumerate(arrivals):
        line.add(Rollout(request_id=f"{number}", request=f"{request}", model="m", n=1, tokens=1, expected=length))
        for _ in range(placements):
            place()
    while len(line):
        place()
    assert len(placed) == len(arrivals)
    turns = [waiter.order[1] for waiter in placed]
    assert turns == sorted(turns), "a rollout waits for those of its turn and of turns before, however long others are"
    for one, other in itertools.combinations(placed, 2):
        if one.rollout.expected == other.rollout.expected and one.order[1] == other.order[1]:
            assert int(one.rollout.request_id) < int(other.rollout.request_id)
