"""Verdicts on canary readings: numbers in, findings out."""

import random
from functools import partial

import pytest

from gateway.weights import verdicts
from gateway.weights.verdicts import Finding, Reading, Result, distance

TOKENS = 64


def vector(seed: int, size: float = 5.0) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(-size * draw.random() for _ in range(TOKENS))


def near(logprobs: tuple[float, ...], by: float, seed: int = 9) -> tuple[float, ...]:
    """Log-probs whose distance is `by`."""
    draw = random.Random(seed)
    return tuple(value + draw.choice((by, -by)) for value in logprobs)


OLD, NEW = vector(1), vector(2)


judge = partial(verdicts.judge, noise=0.01)


def reading(logprobs: tuple[float, ...], version: int = 1) -> Reading:
    return Reading(version, logprobs)


def before(*names: str) -> dict[str, Reading]:
    return {name: reading(OLD, version=0) for name in names}


def results(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.result.value for name, finding in findings.items()}


def test_peers_within_noise_of_each_other_are_verified_and_both_distances_are_told() -> None:
    findings = judge({"a": reading(NEW), "b": reading(near(NEW, 0.01))}, before("a", "b"))
    assert results(findings) == {"a": "verified", "b": "verified"}
    assert findings["a"].to_peers == pytest.approx(0.01)
    assert findings["a"].to_previous == pytest.approx(distance(NEW, OLD))


def test_a_replica_with_the_previous_weights_fails_among_two() -> None:
    findings = judge({"a": reading(NEW), "b": reading(near(OLD, 0.005))}, before("a", "b"))
    assert results(findings) == {"a": "failed", "b": "failed"}
    assert "from the previous version it is 0.005" in findings["b"].reason


@pytest.mark.parametrize("wrong", [OLD, vector(3)])
def test_the_odd_one_of_three_fails_with_distance_and_tolerance_named(wrong: tuple[float, ...]) -> None:
    findings = judge({"a": reading(NEW), "b": reading(NEW), "c": reading(wrong)}, before("a", "b", "c"))
    assert results(findings) == {"a": "verified", "b": "verified", "c": "failed"}
    assert "tolerance 0.03" in findings["c"].reason


def test_two_that_both_moved_and_differ_both_fail() -> None:
    findings = judge({"a": reading(NEW), "b": reading(vector(3))}, before("a", "b"))
    assert results(findings) == {"a": "failed", "b": "failed"}


def test_an_update_that_changes_nothing_is_unchanged_and_not_failed() -> None:
    findings = judge({"a": reading(OLD), "b": reading(near(OLD, 0.01))}, before("a", "b"))
    assert results(findings) == {"a": "unchanged", "b": "unchanged"}


def test_the_previous_version_never_passes_where_the_update_can_be_told_from_noise() -> None:
    for noise in (0.0, 0.001, 0.01, 0.1):
        for times in (4.1, 6.0, 10.0, 100.0):
            new = near(OLD, times * max(noise, 1e-5))
            found = judge({"a": reading(new), "b": reading(OLD)}, before("a", "b"), noise=noise)
            assert found["b"].result is Result.FAILED, (noise, times)


def test_a_replica_alone_says_that_it_has_no_peer() -> None:
    assert results(judge({"a": reading(NEW)}, before("a"))) == {"a": "no peer"}


def test_a_replica_that_comes_back_is_held_to_what_others_said_at_this_version() -> None:
    assert results(judge({"a": reading(NEW)}, {}, elsewhere=[reading(NEW)])) == {"a": "verified"}
    assert results(judge({"a": reading(OLD)}, {}, elsewhere=[reading(NEW), reading(NEW)])) == {"a": "failed"}


def test_all_replicas_stale_alike_are_found_by_the_trainers_log_probs() -> None:
    """Peers agree with each other; what the trainer sent is elsewhere. Its places differ from the engines' for good."""
    trainers_before, trainers = reading(near(OLD, 0.5, 4), version=0), near(NEW, 0.5, 4)
    stale = judge(
        {"a": reading(OLD), "b": reading(OLD)}, before("a", "b"), trainers=trainers, trainers_before=trainers_before
    )
    assert results(stale) == {"a": "failed", "b": "failed"}
    assert "as the trainer's" in stale["a"].reason
    taken = judge({"a": reading(NEW)}, before("a"), trainers=trainers, trainers_before=trainers_before)
    assert results(taken) == {"a": "verified"}


def test_a_trainer_that_did_not_move_fails_nobody() -> None:
    findings = judge({"a": reading(OLD)}, before("a"), trainers=NEW, trainers_before=reading(NEW, version=0))
    assert results(findings) == {"a": "unchanged"}


def test_of_two_that_differ_the_trainers_log_probs_tell_which_is_wrong() -> None:
    findings = judge(
        {"a": reading(NEW), "b": reading(vector(3))},
        before("a", "b"),
        trainers=NEW,
        trainers_before=reading(OLD, version=0),
    )
    assert results(findings) == {"a": "verified", "b": "failed"}
