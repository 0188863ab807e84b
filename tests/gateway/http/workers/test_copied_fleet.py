"""A copy of a replica goes through all that the replica does, in the same order."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engines.engine import Engine
from engines.types import EngineKind, ReplicaInfo, ReplicaState
from gateway.config.schema import Config
from gateway.fleet.changes import Argument, Changes
from gateway.fleet.replica import Flight, Replica
from gateway.http.workers.copied_fleet import CopiedFleet
from gateway.http.workers.messages import Changed, FromOwner, Joined

CONFIG = Config.model_validate({"engine": {"kind": "sim", "model": "sim"}})
INFO = ReplicaInfo(
    replica_id="engine-0", incarnation="1", group="engine", kind=EngineKind.SIM, url="http://127.0.0.1:1", model="sim",
    world_size=1, max_model_len=128, max_num_seqs=8, engine_version="1", capabilities=frozenset({"/pause"}), key="k",
)  # fmt: skip

STATES = st.sampled_from([state for state in ReplicaState if state is not ReplicaState.LOST])
STEPS = st.one_of(
    st.tuples(st.just("enter"), STATES),
    st.tuples(st.just("hold"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("overwrite")),
    st.tuples(st.just("lose_version")),
    st.tuples(st.just("cut_off"), st.booleans()),
    st.tuples(st.just("drop_calls"), st.booleans()),
    st.tuples(st.just("take_off")),
)
DO: dict[str, Callable[..., Any]] = {
    "enter": lambda replica, state: replica.enter(state, f"is {state}"),
    "hold": lambda replica, version, keeps_kv: replica.hold(version, keeps_kv=keeps_kv),
    "overwrite": Replica.overwrite,
    "lose_version": Replica.lose_version,
    "cut_off": lambda replica, is_on: replica.cut_off(is_on=is_on),
    "drop_calls": lambda replica, alone: replica.drop_calls(rollouts_alone=alone),
}


class NoEngine:
    """Stands where an engine's client does."""

    replica_id = "engine-0"

    async def close(self) -> None:
        return


class Copying:
    """Copies the changes that it hears of into a fleet, over bytes as a channel does."""

    def __init__(self, fleet: CopiedFleet) -> None:
        self._fleet = fleet

    def joined(self, replica: Replica) -> None:
        told = Joined(
            replica.info, replica.frozen, replica.state, replica.reason, replica.weight_version, replica.cuts_off
        )
        self._fleet.join(cast(Joined, sent(told)))

    def left(self, replica: Replica) -> None:
        self._fleet.leave(replica.replica_id)

    def changed(self, replica: Replica, change: str, arguments: tuple[Argument, ...]) -> None:
        self._fleet.change(cast(Changed, sent(Changed(replica.replica_id, change, arguments))))

    def versions(self) -> None:
        return

    async def taken(self) -> None:
        return


def sent(message: FromOwner) -> FromOwner:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromOwner)


def copied_fleet() -> CopiedFleet:
    async def examine(*_: object) -> bool:
        return False

    return CopiedFleet(CONFIG, connect=lambda info: cast(Engine, NoEngine()), examine=examine)


def facts(replica: Replica, flights: list[Flight]) -> dict[str, Any]:
    return {
        "state": replica.state,
        "reason": replica.reason,
        "version": replica.weight_version,
        "cuts_off": replica.cuts_off,
        "holds tokens back": not replica._steady.is_set(),
        "flights": [(flight.began, flight.versions, flight.kv_versions({})) for flight in flights],
    }


@given(before=st.lists(STEPS, max_size=4), after=st.lists(STEPS, max_size=12))
def test_a_copy_is_what_its_replica_is_after_each_change(before: list[Any], after: list[Any]) -> None:
    async def live() -> None:
        changes, fleet = Changes(), copied_fleet()
        replica = Replica(INFO, cast(Engine, NoEngine()), frozen=False, changes=changes)
        replica.enter(ReplicaState.SYNCING, "joined")
        for step in before:
            if step[0] != "take_off":
                DO[step[0]](replica, *step[1:])
        copying = Copying(fleet)
        copying.joined(replica)
        changes.follow(copying)
        flights: tuple[list[Flight], list[Flight]] = [], []
        (copy,) = fleet.replicas
        first = facts(copy, []) | {"holds tokens back": not replica._steady.is_set()}
        assert first == facts(replica, [])  # it has no rollout yet whose tokens it could hold back
        if replica._steady.is_set() != copy._steady.is_set():
            replica.enter(ReplicaState.SYNCING, "the same again")
        for step in after:
            if step[0] == "take_off":
                flights[0].append(replica.take_off())
                flights[1].append(copy.take_off())
            else:
                DO[step[0]](replica, *step[1:])
            assert facts(copy, flights[1]) == facts(replica, flights[0]), step

    asyncio.run(live())


async def test_a_lost_replica_ends_the_calls_of_its_copy_and_leaves() -> None:
    changes, fleet = Changes(), copied_fleet()
    replica = Replica(INFO, cast(Engine, NoEngine()), frozen=False, changes=changes)
    copying = Copying(fleet)
    copying.joined(replica)
    changes.follow(copying)
    (copy,) = fleet.replicas
    hanging = asyncio.create_task(copy.unless_lost(asyncio.Event().wait()))
    await asyncio.sleep(0)
    replica.enter(ReplicaState.LOST, "its engine has ended")
    changes.left(replica)
    async with asyncio.timeout(20):
        (error,) = await asyncio.gather(hanging, return_exceptions=True)
    assert "its engine has ended" in str(error)
    assert not fleet.replicas
