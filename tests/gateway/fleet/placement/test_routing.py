"""The choice of a replica for a rollout."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.engine import Engine
from gateway.fleet.placement.routing import Rollout, choose
from gateway.fleet.replica import Replica
from tests.rigs.stories.played_fleet import PlayedFleet


def view(name: str, load_tokens: int = 0, load_samples: int = 0, placed: int = 0) -> Replica:
    """What the choice sees of a replica with room for 8 samples."""
    (replica,) = PlayedFleet([cast(Engine, SimpleNamespace())], places=8).replicas
    replica.info = dataclasses.replace(replica.info, replica_id=name)
    replica.load_tokens, replica.load_samples = load_tokens, load_samples
    replica.rank = 1000 * load_tokens + placed
    return replica


def rollout(n: int = 1, min_version: int = 0, max_staleness: int | None = None) -> Rollout:
    return Rollout(request_id="r", model="m", n=n, tokens=100, min_version=min_version, max_staleness=max_staleness)


def chosen(rollout: Rollout, replicas: Sequence[Replica], **others: Any) -> Replica:
    found = choose(rollout, replicas, **others)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("demands", "newest", "least"),
    [
        ({}, 5, 0),
        ({"min_version": 6}, 5, 6),
        ({"max_staleness": 2}, 6, 4),
        ({"min_version": 2, "max_staleness": 0}, 5, 5),
        ({"min_version": 5, "max_staleness": 9}, 5, 5),
    ],
)
def test_the_stricter_demand_counts(demands: dict[str, int], newest: int, least: int) -> None:
    assert rollout(**demands).least_version(newest) == least


@pytest.mark.parametrize(
    ("replicas", "found"),
    [
        ([view("a", 500, 1), view("b", 40, 4)], "b"),
        ([view("a", placed=3), view("b", placed=2), view("c", placed=5)], "b"),
        ([view("full", 1, 8), view("b", 900, 7)], "b"),
        ([view("full", 1, 8)], None),
        ([], None),
    ],
    ids=["the least tokens", "the least so far", "one with room", "none with room", "nobody"],
)
def test_the_replica_with_the_least_to_do_and_room_is_chosen(replicas: list[Replica], found: str | None) -> None:
    choice = choose(rollout(), replicas)
    assert (choice.replica_id if choice else None) == found


@pytest.mark.parametrize(("busy_samples", "found"), [(1, "idle"), (0, "busy")])
def test_a_group_larger_than_a_replica_goes_to_an_idle_one(busy_samples: int, found: str) -> None:
    assert chosen(rollout(n=64), [view("busy", 0, busy_samples), view("idle", 1)]).replica_id == found


@pytest.mark.parametrize(
    ("home", "other", "found"),
    [
        (view("home", 900, 1), view("other"), "home"),
        (view("home", 1200, 6), view("other", 900, 5), "home"),
        (view("home", 4000, 6), view("other", 900, 5), "other"),
        (view("home", 100, 8), view("other", 900, 5), "other"),
        (view("home", 9000, 7), None, "home"),
    ],
    ids=["busier", "its share", "overloaded", "full", "the only one"],
)
def test_a_session_stays_at_its_home_unless_that_is_overloaded(
    home: Replica, other: Replica | None, found: str
) -> None:
    assert chosen(rollout(), [home, other] if other else [home], home=home).replica_id == found


def test_a_home_that_is_gone_is_as_no_home() -> None:
    assert chosen(rollout(), [view("a", 5, 1), view("b")], home=view("gone")).replica_id == "b"
