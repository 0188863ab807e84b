"""Random interleavings of pushes, deaths, stalls, pauses, adapters, scaling and restarts, in virtual time.

Promises, checked token by token and every tenth of a second: a token's version is what its engine computed with; a
version has one content; no replica serves a mixture, a refused version, or content of a push that failed; no engine is
paused while nobody holds it; a dead trainer's update ends; every call ends; a served version is in the store
or on record; nothing leaks. 20,000 stories: `python -m tests.rigs.stories.story_search 20000 SEED`.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.types import PauseMode
from tests.rigs import virtual_time
from tests.rigs.stories.interleaving import Gateway, Trainer, world_of
from tests.rigs.stories.played_engine import PlayedClient
from tests.rigs.stories.story import Kill, Pause, PushStep, RestartGateway, Resume, Rollout, ScaleUp, Story
from tests.rigs.stories.story_search import Tally, played, search

LEFT_DURING_THE_ABORT = [
    Pause(3.0, PauseMode.ABORT, False),
    Rollout(0.3, 3, False, False),
    Kill(0.3, 0),
    PushStep(0.0, 0, False, True, False, None, 0.0, 0.05),
]
"""The trainer of a relayed update that is being aborted leaves: the draft stayed in the store."""

SCRIBE_DIES_BEFORE_THE_VERDICT = [
    PushStep(0.0, 0, False, False, False, None, 0.0, None),
    Rollout(0.0, 3, False, False),
    Resume(0.1),
    Kill(0.3, 0),
]
"""The scribe of a flat update is lost before the commit fences it: it was SYNCING then, and its draft stayed."""

ENDED_DURING_A_PUSH = [
    PushStep(0.0, 0, True, False, False, None, 0.5, None),
    RestartGateway(0.02, False, 0.1),
    PushStep(0.0, 0, False, False, False, None, 0.0, None),
    Rollout(1.0, 3, False, False),
    PushStep(0.0, 0, False, False, True, None, 0.0, None),
]
"""A trainer writes its draft while the gateway ends: its call must not reach the gateway that is gone."""

REPLACED_GROUP = [
    PushStep(0.0, 0, False, True, False, None, 2.0, None),
    PushStep(0.0, 0, False, False, False, None, 0.0, None),
    PushStep(0.0, 0, False, False, False, None, 0.0, None),
    Resume(0.02),
    PushStep(0.0, 0, False, False, False, None, 0.0, None),
]
"""A slow trainer begins an update after another has replaced its group: nothing may arrive for it."""

PUSH = PushStep(0.0, 0, False, False, False, None, 0.0, None)
COMMITTED_AND_LOST = [
    replace(PUSH, slow_s=0.5),
    ScaleUp(0.3),
    Resume(3.0),
    RestartGateway(0.0, False, 0.1),
    replace(PUSH, partial=True),
    *[PUSH] * 3,
    replace(PUSH, after=1.0),
    RestartGateway(0.0, False, 0.1),
]
"""A gateway ends between the label of version 1 and its copy, and the next update overwrites the engine that has it."""


def test_a_number_whose_tokens_were_delivered_is_not_used_again_after_a_restart() -> None:
    played(COMMITTED_AND_LOST, 3, Tally(), relay=False, replicas=1)


def test_a_draft_is_removed_though_its_trainer_leaves_while_the_update_is_aborted() -> None:
    played(LEFT_DURING_THE_ABORT, 159, Tally(), relay=True, replicas=1)


def test_a_draft_is_removed_though_its_scribe_dies_before_the_verdict() -> None:
    played(SCRIBE_DIES_BEFORE_THE_VERDICT, 0, Tally(), relay=False, replicas=2)


def test_a_trainer_finds_nobody_where_its_gateway_has_ended() -> None:
    played(ENDED_DURING_A_PUSH, 0, Tally(), relay=False, replicas=1)


def test_a_trainer_whose_group_was_replaced_commits_nothing() -> None:
    played(REPLACED_GROUP, 1, Tally(), relay=True, replicas=1)


@pytest.mark.parametrize("labelled", [0, 1, 2])
def test_a_gateway_that_dies_between_the_labels_of_a_commit_has_committed_for_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labelled: int
) -> None:
    label_weights = PlayedClient.label_weights

    async def main() -> None:
        async with world_of(tmp_path, 0, relay=False, replicas=2) as world:
            push: Any = {"partial": False, "bad": False, "in_flight": None, "slow_s": 0.0}
            assert world.gateway is not None
            dying, labels = world.gateway, list[str]()
            assert await Trainer(world).push(dying, "store", **push) == 1

            async def last_of_some(client: PlayedClient, label: str, timeout_s: float, *, is_committed: bool) -> None:
                if is_committed:
                    labels.append(label)
                    if len(labels) > labelled:
                        await asyncio.Event().wait()
                await label_weights(client, label, timeout_s, is_committed=is_committed)

            with monkeypatch.context() as patch:
                patch.setattr(PlayedClient, "label_weights", last_of_some)
                pushing = asyncio.create_task(Trainer(world).push(dying, "store", **push))
                await asyncio.sleep(5.0)
                assert pushing.done() == (labelled == 2)
                await dying.kill()
                await asyncio.gather(pushing, return_exceptions=True)
            again = await Gateway(world).start()
            await Story(world).play([])
            assert again.has_ended
            assert set(world.versions) == ({0, 1, 2, 3} if labelled else {0, 1, 2})

    virtual_time.run(main)


@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_interleaving_keeps_the_promises(examples: int) -> None:
    tally = search(examples, seed=examples)
    assert tally.stories >= examples
    assert tally.delivered > examples  # the stories are no empty ones
    assert tally.pushes - tally.failed > examples


@pytest.mark.parametrize("examples", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_any_interleaving_of_staged_updates_of_which_half_are_refused_keeps_the_promises(examples: int) -> None:
    search(examples, seed=examples, staged=True)
