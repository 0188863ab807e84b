"""The random stories catch a machine that is broken on purpose, in each of these ways."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.types import InFlight
from engines.weight_label import WeightLabel
from gateway.fleet.brake import Brake, Holder
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.pauses import Pauses
from gateway.weights.snapshots import Snapshots
from gateway.weights.updates.store import StoreArrival
from gateway.weights.updates.update import Update
from gateway.weights.verdicts import Finding, Result
from tests.rigs.stories.interleaving import Violation
from tests.rigs.stories.played_engine import PlayedClient
from tests.rigs.stories.story import Kill, PushStep, RestartGateway, Resume, Rollout, Step
from tests.rigs.stories.story_search import Tally, played, search

EXAMPLES = 400
Break = Callable[[pytest.MonkeyPatch], None]


def the_engine_does_not_follow_its_brake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Brake, "_follow", lambda self: None)


def the_end_of_an_update_lets_go_of_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pauses, "end", lambda self: None)


def a_resume_ends_the_updates_hold_too(patch: pytest.MonkeyPatch) -> None:
    resume = Pauses.resume

    async def broken(self: Pauses) -> None:
        await resume(self)
        self._let_go(Holder.UPDATE)

    patch.setattr(Pauses, "resume", broken)


def tokens_are_delivered_before_the_verdict(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: Replica) -> None:
        return

    patch.setattr(Replica, "vouched", broken)


def an_overwritten_replica_keeps_its_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "lose_version", lambda self: None)


def the_canary_is_skipped(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: Canary, replicas: Sequence[Replica], *_: Any, **__: Any) -> dict[Replica, Finding]:
        return dict.fromkeys(replicas, Finding(Result.UNVERIFIED))

    patch.setattr(Canary, "check", broken)


def labels_before_a_verdict_are_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightLabel, "is_committed", property(lambda self: bool(self.held)))


def a_replica_that_is_behind_stays_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CatchUp, "_is_behind", lambda self, replica: False)


def discarded_drafts_stay(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: Snapshots, draft: Any) -> None:
        return

    patch.setattr(Snapshots, "discard", broken)


def commits_are_not_labelled(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: Update, *_: Any) -> dict[Replica, str]:
        return {}

    patch.setattr(Update, "_label", broken)


def a_dead_trainer_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: WeightCoordinator) -> None:
        await asyncio.Event().wait()

    patch.setattr(WeightCoordinator, "_watch_update", broken)


def kv_of_refused_weights_is_kept(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: CatchUp, replica: Replica) -> None:
        return

    patch.setattr(CatchUp, "_reset_cache", broken)


def an_aborted_update_leaves_its_replicas_alone(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Fleet, version: int, reason: str) -> list[Replica]:
        self.update_to = None
        return []

    patch.setattr(Fleet, "abort", broken)


def a_served_version_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: StoreArrival, update: Update) -> None:
        await self.dropped(update)

    patch.setattr(StoreArrival, "after_commit", broken)


def received_tensors_are_not_dropped(patch: pytest.MonkeyPatch) -> None:
    async def broken(self: PlayedClient, timeout_s: float) -> None:
        return

    patch.setattr(PlayedClient, "drop_receipt", broken)


def push(after: float = 0.0, *, bad: bool = False, slow_s: float = 0.0, dies_after: float | None = None) -> PushStep:
    """A push of all tensors over a flat group."""
    return PushStep(after, 0, False, False, bad, None, slow_s, dies_after)


RECOMPUTED_BY_REFUSED = PushStep(0.5, 0, False, False, True, InFlight.RECOMPUTE, 0.0, None)


WAYS: list[Break] = [
    the_engine_does_not_follow_its_brake,
    the_end_of_an_update_lets_go_of_nothing,
    tokens_are_delivered_before_the_verdict,
    an_overwritten_replica_keeps_its_version,
    the_canary_is_skipped,
    a_replica_that_is_behind_stays_behind,
    discarded_drafts_stay,
    an_aborted_update_leaves_its_replicas_alone,
]
RARE: dict[Break, tuple[int, list[Step]]] = {
    a_dead_trainer_is_not_noticed: (2, [push(slow_s=2.0, dies_after=3.0)]),
    a_resume_ends_the_updates_hold_too: (2, [Rollout(0.0, 90, False, False), push(slow_s=0.5), Resume(2.3)]),
    labels_before_a_verdict_are_believed: (2, [push(), push(3.0, bad=True), RestartGateway(0.4, True, 0.1)]),
    commits_are_not_labelled: (2, [push()]),
    a_served_version_is_withdrawn: (2, [replace(push(), store=True), Kill(3.0, 0)]),
    received_tensors_are_not_dropped: (2, [push(slow_s=0.5, dies_after=2.2)]),
    # With a second replica the rollout may restart there, and read nothing of the refused weights.
    kv_of_refused_weights_is_kept: (1, [Rollout(0.0, 90, False, False), RECOMPUTED_BY_REFUSED]),
}
"""Ways that few random stories meet, with the replicas and the steps of a story that does."""
STAGED = {received_tensors_are_not_dropped}


@pytest.mark.parametrize("broken", WAYS, ids=lambda broken: broken.__name__)
def test_random_stories_catch_it(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(Violation):
        search(EXAMPLES, seed=1, shrinks=False)


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("broken", RARE, ids=lambda broken: broken.__name__)
def test_a_story_catches_it(broken: Break, is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_broken:
        broken(monkeypatch)
    with pytest.raises(Violation) if is_broken else contextlib.nullcontext():
        replicas, steps = RARE[broken]
        played(steps, 3, Tally(), relay=False, replicas=replicas, stages=broken in STAGED)
