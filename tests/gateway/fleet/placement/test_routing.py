from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.fleet.placement.routing import Rollout, choose, fresh_enough


@dataclass
class View:
    name: str
    load_tokens: int = 0
    load_samples: int = 0
    max_samples: int = 8
    placed: int = 0
    weight_version: int | None = 0

    @property
    def replica_id(self) -> str:
        return self.name

    @property
    def rank(self) -> int:
        return 1000 * self.load_tokens + self.placed


def rollout(n: int = 1, min_version: int = 0, max_staleness: int | None = None) -> Rollout:
    return Rollout(request_id="r", model="m", n=n, tokens=100, min_version=min_version, max_staleness=max_staleness)


VERSIONS = [View("new", weight_version=5), View("old", weight_version=3), View("unknown", weight_version=None)]


def chosen(rollout: Rollout, replicas: Sequence[View], **others: Any) -> View:
    found = choose(rollout, replicas, **others)
    assert found is not None
    return found[0]


def names(views: Sequence[View]) -> list[str]:
    return [view.name for view in views]


def test_without_demands_every_version_will_do() -> None:
    assert names(fresh_enough(rollout(), VERSIONS, newest=5)) == ["new", "old", "unknown"]


def test_only_replicas_of_the_least_version_or_newer_will_do() -> None:
    assert names(fresh_enough(rollout(min_version=3), VERSIONS, newest=5)) == ["new", "old"]
    assert names(fresh_enough(rollout(min_version=4), VERSIONS, newest=5)) == ["new"]
    assert fresh_enough(rollout(min_version=6), VERSIONS, newest=5) == []


def test_staleness_counts_from_the_version_that_all_are_to_hold() -> None:
    assert names(fresh_enough(rollout(max_staleness=2), VERSIONS, newest=5)) == ["new", "old"]
    assert names(fresh_enough(rollout(max_staleness=2), VERSIONS, newest=6)) == ["new"]
    assert fresh_enough(rollout(max_staleness=0), VERSIONS, newest=6) == []


def test_the_stricter_of_two_demands_holds() -> None:
    assert names(fresh_enough(rollout(min_version=2, max_staleness=0), VERSIONS, newest=5)) == ["new"]
    assert names(fresh_enough(rollout(min_version=5, max_staleness=9), VERSIONS, newest=5)) == ["new"]


@pytest.mark.parametrize(
    ("replicas", "found"),
    [
        ([View("a", 500, 1), View("b", 40, 4)], "b"),
        ([View("a", placed=3), View("b", placed=2), View("c", placed=5)], "b"),
        ([View("full", 1, 8), View("b", 900, 7)], "b"),
        ([View("full", 1, 8)], None),
        ([], None),
    ],
    ids=["the least tokens", "the least so far", "one with room", "none with room", "nobody"],
)
def test_the_replica_with_the_least_to_do_and_room_is_chosen(replicas: list[View], found: str | None) -> None:
    choice = choose(rollout(), replicas)
    assert (choice[0].name if choice else None) == found


@pytest.mark.parametrize(("busy_samples", "found"), [(1, "idle"), (0, "busy")])
def test_a_group_larger_than_a_replica_goes_to_an_idle_one(busy_samples: int, found: str) -> None:
    assert chosen(rollout(n=64), [View("busy", 0, busy_samples), View("idle", 1)]).name == found


@pytest.mark.parametrize(
    ("home", "other", "found"),
    [
        (View("home", 900, 1), View("other"), "home"),
        (View("home", 1200, 6), View("other", 900, 5), "home"),
        (View("home", 4000, 6), View("other", 900, 5), "other"),
        (View("home", 100, 8), View("other", 900, 5), "other"),
        (View("home", 9000, 7), None, "home"),
    ],
    ids=["busier", "its share", "overloaded", "full", "the only one"],
)
def test_a_session_stays_at_its_home_unless_that_is_overloaded(home: View, other: View | None, found: str) -> None:
    assert chosen(rollout(), [home, other] if other else [home], home=home).name == found


def test_a_home_that_is_gone_is_as_no_home() -> None:
    assert chosen(rollout(), [View("a", 5, 1), View("b")], home=View("gone")).name == "b"


def test_the_reason_of_a_choice_says_what_decided() -> None:
    least, more = replicas = [View("least"), View("more", load_tokens=9, load_samples=1)]
    assert choose(rollout(), replicas) == (least, "fewest tokens")
    assert choose(rollout(), replicas, home=more) == (more, "home of its session")
    least.load_samples = 8
    assert choose(rollout(), replicas) == (more, "the only one with room")
