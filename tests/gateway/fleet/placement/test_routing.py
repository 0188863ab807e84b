from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


def but_the_least(views: Iterable[View]) -> list[View]:
    return [view for view in views if view.name != "least"]


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


def test_the_replica_with_the_least_tokens_is_chosen() -> None:
    replicas = [View("a", load_tokens=500, load_samples=1), View("b", load_tokens=40, load_samples=4)]
    assert chosen(rollout(), replicas) is replicas[1]


def test_among_idle_replicas_the_one_given_least_so_far_is_chosen() -> None:
    replicas = [View("a", placed=3), View("b", placed=2), View("c", placed=5)]
    assert chosen(rollout(), replicas) is replicas[1]


def test_a_full_replica_is_not_chosen() -> None:
    replicas = [View("a", load_tokens=1, load_samples=8), View("b", load_tokens=900, load_samples=7)]
    assert chosen(rollout(), replicas) is replicas[1]


def test_nothing_is_chosen_when_all_are_full() -> None:
    assert choose(rollout(n=2), [View("a", load_samples=7)]) is None


def test_a_group_larger_than_a_replica_goes_to_an_idle_one() -> None:
    replicas = [View("a", load_tokens=1, load_samples=1), View("b")]
    assert chosen(rollout(n=64), replicas) is replicas[1]


def test_nothing_is_chosen_from_nobody() -> None:
    assert choose(rollout(), []) is None


def test_a_session_goes_to_its_home_though_another_has_less_to_do() -> None:
    replicas = [View("home", load_tokens=900, load_samples=1), View("idle")]
    assert chosen(rollout(), replicas, home=replicas[0]) is replicas[0]


def test_a_busy_home_is_kept_while_it_has_no_more_than_its_share() -> None:
    replicas = [View("home", load_tokens=1200, load_samples=6), View("b", load_tokens=900, load_samples=5)]
    assert chosen(rollout(), replicas, home=replicas[0]) is replicas[0]


def test_an_overloaded_home_is_left() -> None:
    replicas = [View("home", load_tokens=4000, load_samples=6), View("b", load_tokens=900, load_samples=5)]
    assert chosen(rollout(), replicas, home=replicas[0]) is replicas[1]


def test_a_full_home_is_left() -> None:
    replicas = [View("home", load_tokens=100, load_samples=8), View("b", load_tokens=900, load_samples=5)]
    assert chosen(rollout(), replicas, home=replicas[0]) is replicas[1]


def test_a_home_that_is_gone_is_as_no_home() -> None:
    replicas = [View("a", load_tokens=5, load_samples=1), View("b")]
    assert chosen(rollout(), replicas, home=View("gone")) is replicas[1]


def test_the_only_replica_is_never_left() -> None:
    replicas = [View("home", load_tokens=9000, load_samples=7)]
    assert chosen(rollout(), replicas, home=replicas[0]) is replicas[0]


def test_a_session_goes_to_the_least_loaded_replica_that_admits_it() -> None:
    replicas = [
        View("least"),
        View("more", load_tokens=9, load_samples=1),
        View("most", load_tokens=10, load_samples=1),
    ]
    assert chosen(rollout(), replicas, admitting=but_the_least) is replicas[1]
    assert chosen(rollout(), replicas, home=replicas[0], admitting=but_the_least) is replicas[1]
    assert choose(rollout(), replicas, admitting=lambda views: []) is None


def test_the_fewest_tokens_may_be_on_a_full_replica_and_then_the_next_is_chosen() -> None:
    replicas = [View("full", load_tokens=8, load_samples=8), View("b", load_tokens=100, load_samples=5)]
    assert chosen(rollout(), replicas) is replicas[1]


def test_the_reason_of_a_choice_says_where_kv_decided() -> None:
    least, more = replicas = [View("least"), View("more", load_tokens=9, load_samples=1)]
    turn = replace(rollout(), session="agent")
    assert choose(turn, replicas) == (least, "fewest tokens")
    assert choose(turn, replicas, admitting=but_the_least) == (
        more,
        "fewest tokens of those with KV for its session",
    )
    least.load_samples = 8
    assert choose(turn, replicas) == (more, "the only one with room")
