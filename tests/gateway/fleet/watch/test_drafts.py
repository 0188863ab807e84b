"""Drafts of replicas: the version of frozen ones, their acceptance and its falls, in status, metrics and events."""

from typing import Any, cast

import pytest

from engines.errors import EngineFailed
from gateway.cli.output import print_fleet
from gateway.fleet.watch.drafts import _Draft
from tests.rigs.rig import Json, Rig, StartRig

SPECULATES: Json = {"draft_tokens": 4, "draft_acceptance": 0.7, "draft_decay": 0.3, "decode_step_s": 0.0}


async def decode(rig: Rig) -> None:
    """Make enough draft tokens on each replica, between two looks."""
    await rig.drafts.look()
    await rig.complete([[5, index] for index in range(16 * len(rig.replicas))], max_tokens=128, ignore_eos=True)
    await rig.drafts.look()


async def draft_of(rig: Rig, index: int = 0) -> Any:
    async with rig.client.get(rig.url + "/status") as response:
        return (await response.json())["replicas"][index]["draft"]


async def falls(rig: Rig) -> list[str]:
    return [event["text"] for event in rig.fleet.events.last if "acceptance" in event["text"]]


async def test_a_replica_without_speculative_decoding_has_no_draft(rig: Rig) -> None:
    await decode(rig)
    assert await draft_of(rig) is None


async def test_a_frozen_draft_its_acceptance_and_its_fall_are_reported(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim=SPECULATES)
    await rig.open_group()
    await decode(rig)
    assert await draft_of(rig) == {
        "method": "draft_model",
        "weights": "frozen",
        "summary": "frozen since version 0",
        "version": 0,
        "shared": [],
        "reason": "its checkpoint is its own: no update has its tensors",
        "acceptance": 0.7,
        "reference": {"acceptance": 0.7, "version": 0},
    }
    assert await falls(rig) == []
    await rig.update()
    await decode(rig)
    draft = await draft_of(rig, 1)
    assert (draft["version"], draft["acceptance"]) == (0, 0.49)
    assert draft["reference"] == {"acceptance": 0.49, "version": 1}
    expected = (
        "acceptance of the draft fell from 70% at version 0 to 49% at version 1: tokens are right, and come slower; "
        "the draft is frozen since version 0"
    )
    assert await falls(rig) == [expected, expected]  # of each replica
    async with rig.client.get(rig.url + "/metrics") as response:
        page = await response.text()
    for line in (
        'rollout_gateway_draft_acceptance{replica="engine-1"} 0.49',
        'rollout_gateway_draft_versions_behind{replica="engine-1"} 1.0',
        'rollout_gateway_draft_acceptance_falls_total{replica="engine-1"} 1.0',
    ):
        assert line in page
    assert 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="sim",replica="engine-1"}' in page


async def test_status_prints_a_row_for_each_draft(start_rig: StartRig, capsys: pytest.CaptureFixture[str]) -> None:
    rig = await start_rig(1, sim=SPECULATES)
    await rig.drafts.look()
    print_fleet((await rig.get("/status"))[1])
    assert "draft of engine-0:      draft_model, weights frozen since version 0; acceptance unknown yet" in (
        capsys.readouterr().out
    )


async def test_an_engine_that_cannot_say_what_its_draft_holds_has_its_acceptance_reported(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(1, sim=SPECULATES)

    async def report_draft(timeout_s: float) -> None:
        raise EngineFailed("the worker has no method 'report_draft'", replica_id="engine-0")

    monkeypatch.setattr(cast(Any, rig.fleet.replicas[0].engine), "report_draft", report_draft)
    await rig.open_group()
    await rig.update()  # the next look asks again
    await decode(rig)
    draft = await draft_of(rig)
    assert (draft["weights"], draft["acceptance"]) == ("unknown", 0.49)


def test_sglangs_share_is_weighed_with_the_tokens_of_its_steps() -> None:
    draft = _Draft(0.8)

    def page(rate: float, tokens: int) -> str:
        return (
            f'sglang:spec_accept_rate{{tp_rank="0"}} {rate}\n'
            f'sglang:realtime_tokens_total{{mode="decode"}} {tokens}\n'
        )  # fmt: skip

    assert [draft.count(page(*one)) for one in ((0.9, 100), (0.5, 300), (0.8, 300), (0.25, 700))] == [True] * 4
    assert (draft.drafted, draft.accepted) == (600.0, 200.0)
    assert not draft.count("vllm:num_requests_running 1\n")


def report_of(weights: str, loads: int) -> Json:
    return {"method": "mtp", "weights": weights, "shared": [], "loads": loads, "reason": ""}


def test_the_version_of_a_draft_is_that_of_its_last_update() -> None:
    draft = _Draft(0.8)
    assert draft.summary == "unknown"
    draft.note(report_of("updated", 0), 0)
    draft.note(report_of("updated", 3), 3)
    assert draft.version == 3
    draft.note(report_of("frozen", 3), 4)
    assert draft.version == 3
    assert draft.summary == "frozen since version 3"


def test_a_gateway_that_was_restarted_does_not_guess_when_a_draft_was_frozen() -> None:
    draft = _Draft(0.8)
    draft.note(report_of("frozen", 3), 9)
    assert draft.version is None
    assert draft.summary == "frozen"
    fresh = _Draft(0.8)
    fresh.note(report_of("frozen", 0), 9)
    assert fresh.version == 0
