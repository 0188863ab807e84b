"""The canary over a fleet of simulated engines: what ends an update, and what the trainer is told."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import EngineRefused
from gateway.config.schema import CanaryConfig
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary, canary_token_ids
from gateway.weights.verdicts import Result
from tests.rigs.rig import Json, Rig, StartRig

STALE = {"corrupt_after": 1}


async def finished(rig: Rig, body: Json | None = None) -> tuple[int, Json]:
    """An update up to its end, which may fail."""
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    return await rig.post("/finish_weight_update", body or {})


async def test_one_wrong_replica_aborts_the_update_and_is_named(start_rig: StartRig) -> None:
    rig = await start_rig(3, odd={"engine-1": STALE})
    await rig.open_group()
    assert (await finished(rig))[0] == 200
    status, reply = await finished(rig)
    assert status == 424
    assert "replica engine-1: " in reply["error"]["message"]
    assert "tolerance" in reply["error"]["message"]
    assert (await rig.get("/status"))[1]["weight_version"] == 1
    assert "SERVING" not in (await rig.states()).values()


async def refusal(rig: Rig) -> str:
    """Have an update refused. Return the reason."""
    status, reply = await finished(rig)
    assert status == 424, reply
    return str(reply["error"]["message"])


async def test_rounding_noise_fails_nobody_and_hides_no_stale_replica(start_rig: StartRig) -> None:
    sim = {"logprob_noise": 0.1, "decode_step_s": 0.005}
    rig = await start_rig(3, sim=sim, odd={"engine-1": {"corrupt_after": 2}})
    await rig.open_group()
    await finished(rig)
    await finished(rig)
    assert set((await rig.states()).values()) == {"SERVING"}
    assert "replica engine-1" in await refusal(rig)


async def test_a_replica_that_does_not_answer_the_canary_in_time_fails(start_rig: StartRig) -> None:
    slow = {"prefill_tokens_per_s": 0.1}
    rig = await start_rig(3, odd={"engine-1": slow}, weights={"canary": {"timeout_s": 2.0}})
    await rig.open_group()
    assert "weights.canary.timeout_s" in await refusal(rig)


def refused(text: str) -> EngineRefused:
    return EngineRefused(f"/v1/completions answered 400: {text}", status=400, body={})


NO_LOGPROBS: Json = {"choices": [{"text": "a"}]}
NAN: Json = {"choices": [{"prompt_logprobs": [None, *({str(one): {"logprob": math.nan}} for one in range(63))]}]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refused("no prompt_logprobs here"), ""),
        (refused("Out of range float values are not JSON compliant"), "is not finite: the weights hold"),
        (NO_LOGPROBS, "lacks log-probs of the prompt's tokens"),
        (NAN, "is not finite: the weights hold"),
    ],
    ids=["refused", "vllm's NaN", "a server without log-probs of prompts", "NaN"],
)
async def test_an_answer_without_the_canarys_log_probs_ends_the_update_unless_the_server_refuses_to_give_them(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, answer: EngineRefused | Json, said: str
) -> None:
    rig = await start_rig(3)
    await rig.open_group()
    monkeypatch.setattr(Canary, "token_ids", lambda *_: [0, *range(63)])

    async def odd(*_: object) -> Json:
        if isinstance(answer, EngineRefused):
            raise answer
        return answer

    monkeypatch.setattr(rig.fleet.replicas[1].engine, "generate", odd)
    if said:
        assert said in await refusal(rig)
    else:
        assert (await finished(rig))[0] == 200
        assert set((await rig.states()).values()) == {"SERVING"}


async def test_without_the_canary_nobody_is_asked(start_rig: StartRig) -> None:
    rig = await start_rig(2, odd={"engine-1": STALE}, weights={"canary": {"enabled": False}})
    await rig.open_group()
    await finished(rig)
    assert (await finished(rig))[0] == 200
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_a_trainer_that_sends_its_log_probs_has_them_compared(rig: Rig) -> None:
    await rig.open_group()
    token_ids = (await rig.get("/v1/weight_canary"))[1]["token_ids"]
    assert len(token_ids) == 64
    logprobs = [-1.0] * (len(token_ids) - 1)
    assert (await finished(rig, {"canary_logprobs": logprobs}))[0] == 200
    moved = [value - 5 for value in logprobs]
    status, reply = await finished(rig, {"canary_logprobs": moved})
    assert status == 424
    assert "as the trainer's" in reply["error"]["message"]


@pytest.mark.parametrize("wrong", ["x", [1.0], [None] * 63])
async def test_log_probs_that_are_not_of_the_canary_are_refused_and_may_be_sent_again(rig: Rig, wrong: object) -> None:
    await rig.open_group()
    status, reply = await finished(rig, {"canary_logprobs": wrong})
    assert (status, reply["error"]["param"]) == (400, "canary_logprobs")
    assert (await rig.post("/finish_weight_update", {}))[1]["weight_version"] == 1


async def test_the_sequence_is_the_same_each_time_and_inside_every_vocabulary(rig: Rig) -> None:
    infos = [replica.info for replica in rig.replicas]
    token_ids = canary_token_ids(infos, 64)
    assert token_ids == canary_token_ids(infos[::-1], 64)
    assert all(0 <= token_id < 96 for token_id in token_ids)
    assert len(canary_token_ids(infos, 4096)) == infos[0].max_model_len - 1  # type: ignore[operator]


FP8 = {"logprob_noise": 0.32}
"""As fp8 on H100: 0.16 nats a token between an idle batch and a large one, the same each time."""


def loaded(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have these replicas score the canary in large batches alone, as under rollouts."""
    score = Canary._score

    async def beside(canary: Canary, replica: Replica, token_ids: list[int]) -> tuple[float, ...]:
        others = 7 if replica.replica_id in names else 0
        *_, scored = await asyncio.gather(*(score(canary, replica, token_ids) for _ in range(others + 1)))
        return scored

    monkeypatch.setattr(Canary, "_score", beside)


async def test_fp8_replicas_that_differ_by_their_load_alone_take_an_update_together(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(3, sim=FP8)
    await rig.open_group()
    for busy in ("engine-0", "engine-1"):
        with monkeypatch.context() as patch:
            loaded(patch, busy)
            await rig.update()
        assert set((await rig.states()).values()) == {"SERVING"}


@pytest.mark.parametrize("comes_back", [False, True])
async def test_replicas_that_show_no_noise_under_load_refuse_no_idle_one(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    rig = await start_rig(3, sim=FP8, weights={"store": str(folder)})
    loaded(monkeypatch, "engine-0", "engine-1")
    measured = Canary._noise_of

    async def saturated(canary: Canary, replica: Replica) -> float:
        return 0.0 if replica.replica_id in ("engine-0", "engine-1") else await measured(canary, replica)

    monkeypatch.setattr(Canary, "_noise_of", saturated)
    with monkeypatch.context() as patch:
        if comes_back:
            loaded(patch, "engine-2")  # no two are apart at first
        assert (await rig.push(folder))[0] == 200
    if not comes_back:
        return
    await rig.replicas[2].kill()
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    await rig.add_replica("engine-2")
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SERVING"})


async def test_noise_that_was_measured_too_small_is_measured_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(2, sim=FP8)
    one, other = rig.fleet.replicas
    canary = Canary(CanaryConfig(), {})
    with monkeypatch.context() as patch:
        loaded(patch, "engine-0")
        await canary.check([one], 1)
    canary.accept()
    one.weight_version = 1
    canary._noises[canary._kind(one)] = 0.01
    assert (await canary.admit(other, 1)).may_serve
    assert canary._noises[canary._kind(one)] > 0.1


async def test_the_only_replica_is_not_held_to_the_reading_of_the_dead_one_that_it_follows(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts that wait for it keep the dead replica, and so its reading, in memory."""
    rig = await start_rig(1, sim=FP8, weights={"store": str(folder)})
    with monkeypatch.context() as patch:
        loaded(patch, "engine-0")
        assert (await rig.push(folder))[0] == 200
    task = asyncio.create_task(rig.complete([5, 6], max_tokens=80, ignore_eos=True))
    await rig.begun(tokens=2)
    await rig.kill_loaded()
    await rig.until({})
    (await rig.add_replica("engine-0")).hurry()
    await rig.until({"engine-0": "SERVING"})
    assert {span["version"] for span in (await task)["choices"][0]["weight_versions"]} == {1}


async def test_a_replica_without_others_is_not_held_to_its_own_reading(rig: Rig) -> None:
    one, other = rig.fleet.replicas
    canary = Canary(CanaryConfig(), {})
    await canary.check([one], 1)
    canary.accept()
    await rig.open_group()
    await rig.update()  # and now it scores other weights
    finding = await canary.admit(one, 1)
    assert (finding.result, finding.may_serve) == (Result.NO_PEER, True)
    await rig.update()
    assert not (await canary.admit(other, 1)).may_serve  # it has a peer now


@pytest.mark.parametrize(("numerics", "expected"), [({}, Result.VERIFIED), ({"quantization": "fp8"}, Result.NO_PEER)])
async def test_external_groups_are_peers_unless_their_configuration_names_other_numerics(
    rig: Rig, numerics: Json, expected: Result
) -> None:
    one, other = rig.fleet.replicas
    server: Json = {"kind": "external", "url": "http://127.0.0.1:1"}
    canary = Canary(
        CanaryConfig(),
        {"one": EngineConfig.model_validate(server), "other": EngineConfig.model_validate(server | numerics)},
    )
    one.info, other.info = replace(one.info, group="one"), replace(other.info, group="other")
    findings = await canary.check([one, other], 1)
    assert {finding.result for finding in findings.values()} == {expected}
