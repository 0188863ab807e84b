from dataclasses import dataclass

from gateway.routing import Rollout, choose


@dataclass
class View:
    name: str
    load_tokens: int = 0
    load_samples: int = 0
    max_samples: int = 8
    placed: int = 0


def rollout(n: int = 1) -> Rollout:
    return Rollout(request_id="r", model="m", n=n, tokens=100)


def test_the_replica_with_the_least_tokens_is_chosen() -> None:
    replicas = [View("a", load_tokens=500, load_samples=1), View("b", load_tokens=40, load_samples=4)]
    assert choose(rollout(), replicas) is replicas[1]


def test_among_idle_replicas_the_one_given_least_so_far_is_chosen() -> None:
    replicas = [View("a", placed=3), View("b", placed=2), View("c", placed=5)]
    assert choose(rollout(), replicas) is replicas[1]


def test_a_full_replica_is_not_chosen() -> None:
    replicas = [View("a", load_tokens=1, load_samples=8), View("b", load_tokens=900, load_samples=7)]
    assert choose(rollout(), replicas) is replicas[1]


def test_nothing_is_chosen_when_all_are_full() -> None:
    assert choose(rollout(n=2), [View("a", load_samples=7)]) is None


def test_a_group_larger_than_a_replica_goes_to_an_idle_one() -> None:
    replicas = [View("a", load_tokens=1, load_samples=1), View("b")]
    assert choose(rollout(n=64), replicas) is replicas[1]


def test_nothing_is_chosen_from_nobody() -> None:
    assert choose(rollout(), []) is None
