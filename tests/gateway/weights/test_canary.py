"""The canary over a fleet of simulated engines: who is fenced, what the trainer is told, what is delivered."""

import asyncio
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest

from engines.config import EngineConfig
from engines.errors import EngineFailed, EngineRefused
from gateway.config.schema import CanaryConfig
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary, canary_token_ids
from gateway.weights.verdicts import Result
from sim.model import SimModel, read, weights_key
from tests.rigs.rig import Json, Rig, StartRig

STALE = {"corrupt_after": 1}
GARBAGE = {"corrupt_after": 1, "corrupt": "garbage"}
QUORUM = {"must_pass": "quorum"}


async def finished(rig: Rig, body: Json | None = None) -> tuple[int, Json]:
    """An update up to its end, which may fail."""
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    return await rig.post("/finish_weight_update", body or {})


async def replicas(rig: Rig) -> dict[str, Json]:
    _, status = await rig.get("/status")
    return {replica["replica_id"]: replica for replica in status["replicas"]}


def logprobs_of(rig: Rig, token_ids: list[int], version: str) -> list[float]:
    """Log-probs of all tokens but the first with the weights of a version."""
    model, key = SimModel.of(rig.sim), weights_key(version)
    contexts = [read(token_ids[:end]) for end in range(1, len(token_ids))]
    return [model.logprob(c, t, key) for c, t in zip(contexts, token_ids[1:], strict=True)]


async def test_healthy_replicas_pass_update_after_update(rig: Rig) -> None:
    await rig.open_group()
    for version in (1, 2, 3):
        assert (await finished(rig))[1]["weight_version"] == version
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}


@pytest.mark.parametrize("odd", [STALE, GARBAGE])
async def test_under_policy_all_one_wrong_replica_aborts_the_update_and_is_named(
    start_rig: StartRig, odd: Json
) -> None:
    rig = await start_rig(3, odd={"engine-1": odd})
    await rig.open_group()
    assert (await finished(rig))[0] == 200
    status, reply = await finished(rig)
    assert status == 424
    assert "replica engine-1: " in reply["error"]["message"]
    assert "tolerance" in reply["error"]["message"]
    assert (await rig.get("/status"))[1]["weight_version"] == 1
    assert "SERVING" not in (await rig.states()).values()


@pytest.mark.parametrize("odd", [STALE, GARBAGE])
async def test_under_a_quorum_the_wrong_replica_is_fenced_and_the_rest_serves(start_rig: StartRig, odd: Json) -> None:
    rig = await start_rig(3, odd={"engine-1": odd}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    assert (await finished(rig))[1]["weight_version"] == 2
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SYNCING", "engine-2": "SERVING"}
    reason = (await replicas(rig))["engine-1"]["reason"]
    assert "fenced at version 2" in reason
    assert "tolerance" in reason
    reply = await rig.complete([[5]] * 8)
    assert {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]} == {2}
    assert (await replicas(rig))["engine-1"]["samples_placed"] == 0


async def test_under_a_quorum_a_replica_that_does_not_load_is_fenced_and_resumed(start_rig: StartRig) -> None:
    rig = await start_rig(3, weights=QUORUM)
    await rig.open_group()

    async def fail(version: int, timeout_s: float) -> None:
        raise EngineFailed("no memory", replica_id="engine-1")

    rig.fleet.replicas[1].engine.finish_weight_update = fail  # type: ignore[method-assign]
    assert (await finished(rig))[1]["weight_version"] == 1
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SYNCING", "engine-2": "SERVING"}
    assert "no memory" in (await replicas(rig))["engine-1"]["reason"]
    async with asyncio.timeout(20):
        while rig.fleet.replicas[1].brake.holders:
            await asyncio.sleep(0.01)
    _, updates = await rig.get("/v1/weight_updates")
    assert updates["weight_updates"][0]["replicas"]["engine-1"]["canary"]["result"] == "failed"


async def test_without_a_quorum_a_replica_that_does_not_load_takes_all_back(start_rig: StartRig) -> None:
    rig = await start_rig(3, weights=QUORUM | {"quorum": 0.9})
    await rig.open_group()

    async def fail(version: int, timeout_s: float) -> None:
        raise EngineFailed("no memory", replica_id="engine-1")

    rig.fleet.replicas[1].engine.finish_weight_update = fail  # type: ignore[method-assign]
    status, reply = await finished(rig)
    assert (status, reply["error"]["replica_id"], rig.fleet.version) == (424, "engine-1", 0)


async def test_too_few_that_pass_are_no_quorum(start_rig: StartRig) -> None:
    odd = {"engine-1": STALE, "engine-2": STALE}
    rig = await start_rig(3, odd=odd, weights={"must_pass": "quorum", "quorum": 0.9})
    await rig.open_group()
    await finished(rig)
    assert (await finished(rig))[0] == 424


async def test_of_two_replicas_the_one_that_did_not_move_is_fenced(start_rig: StartRig) -> None:
    rig = await start_rig(2, odd={"engine-0": STALE}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    await finished(rig)
    assert await rig.states() == {"engine-0": "SYNCING", "engine-1": "SERVING"}
    assert "previous version" in (await replicas(rig))["engine-0"]["reason"]


async def test_the_reason_of_a_fence_outlives_a_late_probe(start_rig: StartRig) -> None:
    rig = await start_rig(2, odd={"engine-0": STALE}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    await finished(rig)
    rig.fleet.suspect(rig.fleet.replicas[0], "a probe came late")
    await rig.until({"engine-0": "SYNCING", "engine-1": "SERVING"})
    assert "fenced at version 2" in (await replicas(rig))["engine-0"]["reason"]


async def test_a_fenced_replica_that_takes_a_later_update_serves_again(start_rig: StartRig) -> None:
    rig = await start_rig(3, odd={"engine-1": STALE}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    await finished(rig)
    rig.replicas[1].heal()
    await finished(rig)
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_rounding_noise_fails_nobody_and_hides_no_stale_replica(start_rig: StartRig) -> None:
    sim = {"logprob_noise": 0.1, "decode_step_s": 0.005}
    rig = await start_rig(3, sim=sim, odd={"engine-1": {"corrupt_after": 2}}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    await finished(rig)
    assert set((await rig.states()).values()) == {"SERVING"}
    await finished(rig)
    assert (await rig.states())["engine-1"] == "SYNCING"


async def test_a_replica_that_does_not_answer_the_canary_in_time_fails(start_rig: StartRig) -> None:
    slow = {"prefill_tokens_per_s": 0.1}
    rig = await start_rig(2, odd={"engine-1": slow}, weights=QUORUM | {"canary": {"timeout_s": 2.0}})
    await rig.open_group()
    assert (await finished(rig))[0] == 200
    assert (await rig.states())["engine-1"] == "SYNCING"
    assert "weights.canary.timeout_s" in (await replicas(rig))["engine-1"]["reason"]


async def test_a_replica_that_dies_before_the_canary_holds_nobody_up(rig: Rig) -> None:
    await rig.open_group()
    engine = rig.fleet.replicas[1].engine
    finish = engine.finish_weight_update

    async def finish_and_die(version: int, timeout_s: float) -> None:
        await finish(version, timeout_s)
        await rig.replicas[1].kill()

    engine.finish_weight_update = finish_and_die  # type: ignore[method-assign]
    assert (await finished(rig))[1].get("weight_version") == 1
    assert (await rig.states())["engine-0"] == "SERVING"
    await rig.complete([[5]])


async def test_a_canary_that_an_engine_refuses_leaves_it_unverified_and_serving(rig: Rig) -> None:
    await rig.open_group()
    engine = rig.fleet.replicas[1].engine

    async def refuse(path: str, body: Json, timeout_s: float) -> Json:
        raise EngineRefused("no prompt_logprobs here", status=400, body={}, replica_id="engine-1")

    generate, engine.generate = engine.generate, refuse  # type: ignore[method-assign]
    assert (await finished(rig))[0] == 200
    engine.generate = generate  # type: ignore[method-assign]
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_a_canary_that_an_engine_refuses_to_report_as_nan_fails(rig: Rig) -> None:
    await rig.open_group()

    async def refuse(*_: object) -> Json:
        text = "/v1/completions answered 400: Out of range float values are not JSON compliant"
        raise EngineRefused(text, status=400, body={}, replica_id="engine-0")

    rig.fleet.replicas[0].engine.generate = refuse  # type: ignore[assignment, method-assign]
    status, reply = await finished(rig)
    assert status == 424
    assert "replica engine-0: " in reply["error"]["message"]


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": {}}, {"choices": ["text"]}, {"choices": [{"prompt_logprobs": ["text"] * 64}]}],
)
async def test_under_a_quorum_a_canary_of_another_form_fences_the_replica_that_gave_it(
    start_rig: StartRig, answer: Json
) -> None:
    rig = await start_rig(3, weights=QUORUM)
    await rig.open_group()

    async def odd(path: str, body: Json, timeout_s: float) -> Json:
        return answer

    rig.fleet.replicas[1].engine.generate = odd  # type: ignore[method-assign]
    status, reply = await finished(rig)
    assert (status, reply["weight_version"]) == (200, 1)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SYNCING", "engine-2": "SERVING"}
    assert "no answer to the canary" in (await replicas(rig))["engine-1"]["reason"]


def saying(replica: Replica, logprob: object) -> None:
    """Have a replica answer the canary with this as each log-prob."""
    generate = replica.engine.generate

    async def odd(path: str, body: Json, timeout_s: float) -> Json:
        answer = await generate(path, body, timeout_s)
        for scored in filter(None, answer["choices"][0].get("prompt_logprobs") or []):
            for one in scored.values():
                one["logprob"] = logprob
        return answer

    replica.engine.generate = odd  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [-1e308, 1e308, -1e39, pytest.param(10**400, id="beyond floats"), True, "-1.0", None])
async def test_under_a_quorum_log_probs_that_are_none_fence_the_replica_that_gave_them(
    start_rig: StartRig, value: object
) -> None:
    rig = await start_rig(3, weights=QUORUM)
    await rig.open_group()
    saying(rig.fleet.replicas[1], value)
    status, reply = await finished(rig)
    assert (status, reply["weight_version"]) == (200, 1)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SYNCING", "engine-2": "SERVING"}
    assert "which is no log-prob" in (await replicas(rig))["engine-1"]["reason"]


@pytest.mark.parametrize("value", [-1e308, -3e38])
async def test_a_returning_replica_with_log_probs_of_any_size_takes_no_other_along(
    start_rig: StartRig, value: float
) -> None:
    rig = await start_rig(3)
    saying(rig.fleet.replicas[1], value)
    fleet = rig.fleet.replicas
    findings = await Canary(CanaryConfig(), {}).admit(fleet, 0)
    assert [findings[replica].may_serve for replica in fleet] == [True, False, True]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
async def test_log_probs_that_are_not_finite_are_told_as_such(rig: Rig, value: float) -> None:
    await rig.open_group()
    saying(rig.fleet.replicas[1], value)
    status, reply = await finished(rig)
    assert (status, "not finite" in reply["error"]["message"]) == (424, True)


async def test_positive_numbers_are_compared_as_others_are(rig: Rig) -> None:
    """As an engine that reports logits gives them."""
    await rig.open_group()
    for replica in rig.fleet.replicas:
        saying(replica, 3.5)
    assert (await finished(rig))[0] == 200


async def test_under_policy_all_a_canary_of_another_form_aborts_the_update_and_names_the_replica(rig: Rig) -> None:
    await rig.open_group()

    async def odd(path: str, body: Json, timeout_s: float) -> Json:
        return {"choices": []}

    rig.fleet.replicas[1].engine.generate = odd  # type: ignore[method-assign]
    status, reply = await finished(rig)
    assert status == 424
    assert "replica engine-1: no answer to the canary: its answer {'choices': []}" in reply["error"]["message"]


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
@pytest.mark.parametrize("in_a_batch", [False, True])
async def test_log_probs_that_are_no_numbers_fail_even_where_all_agree(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wrong: float, in_a_batch: bool
) -> None:
    await rig.open_group()
    scored = Canary._score

    async def score(canary: Canary, replica: Replica, token_ids: list[int]) -> tuple[float, ...]:
        asked[replica.replica_id] += 1
        is_wrong = asked[replica.replica_id] > 1 or not in_a_batch
        return (*(await scored(canary, replica, token_ids))[:-1], wrong if is_wrong else -1.0)

    asked: Counter[str] = Counter()
    monkeypatch.setattr(Canary, "_score", score)
    status, reply = await finished(rig)
    assert (status, "not finite" in reply["error"]["message"]) == (424, True)


async def test_without_the_canary_nobody_is_asked(start_rig: StartRig) -> None:
    rig = await start_rig(2, odd={"engine-1": STALE}, weights={"canary": {"enabled": False}})
    await rig.open_group()
    await finished(rig)
    assert (await finished(rig))[0] == 200
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_an_update_under_a_pause_is_verified_and_the_pause_goes_on(start_rig: StartRig) -> None:
    rig = await start_rig(2, odd={"engine-1": STALE}, weights=QUORUM)
    await rig.open_group()
    await finished(rig)
    running = asyncio.create_task(rig.complete([[5], [6]], max_tokens=100, ignore_eos=True))
    await rig.begun(2)
    await rig.post("/pause?mode=keep")
    assert (await finished(rig))[1]["weight_version"] == 2
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SYNCING"}
    await asyncio.sleep(0.1)
    assert not running.done()
    rig.hurry()
    await rig.post("/resume")
    choices = (await running)["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [100, 100]
    versions = [[span["version"] for span in choice["weight_versions"]] for choice in choices]
    assert sorted(versions) == [[1, 2], [2]]  # what the fenced replica had begun was made anew by the other


async def test_nothing_of_an_aborted_update_is_delivered(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"queue_timeout_s": 20})
    await rig.open_group()
    body = {"model": "sim", "prompt": [5], "max_tokens": 60, "ignore_eos": True}
    running = asyncio.create_task(rig.post("/v1/completions", body))
    await rig.begun()
    await rig.post("/pause?mode=keep")
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    await rig.post("/init_weight_transfer_engine", {"init_info": {"world_size": 2, "rank_offset": 1}})
    rig.hurry()
    await rig.post("/resume")
    status, reply = await running
    assert status == 200, reply
    assert reply["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 60}]


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


async def test_a_replica_that_was_not_read_is_not_held_to_its_move_since_an_earlier_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.open_group()
    token_ids = (await rig.get("/v1/weight_canary"))[1]["token_ids"]

    def said(version: str) -> dict[str, list[float]]:
        return {"canary_logprobs": logprobs_of(rig, token_ids, version)}

    scored = Canary._score

    async def score(canary: Canary, replica: Replica, token_ids: list[int]) -> tuple[float, ...]:
        if is_deaf and replica.replica_id == "engine-1":
            raise EngineRefused("not now", status=400, body={}, replica_id="engine-1")
        return await scored(canary, replica, token_ids)

    is_deaf = False
    monkeypatch.setattr(Canary, "_score", score)
    assert (await finished(rig, said("1")))[0] == 200
    is_deaf = True
    assert (await finished(rig, said("2")))[0] == 200
    is_deaf = False
    await rig.post("/pause?mode=keep")  # nobody is read before the update
    status, reply = await finished(rig, said("3"))
    assert status == 200, reply


async def test_a_fenced_replica_is_not_held_to_the_trainers_move_from_a_version_that_it_did_not_take(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(3, odd={"engine-1": GARBAGE}, weights=QUORUM)
    await rig.open_group()
    token_ids = (await rig.get("/v1/weight_canary"))[1]["token_ids"]
    for version in ("1", "2", "3"):
        assert (await finished(rig, {"canary_logprobs": logprobs_of(rig, token_ids, version)}))[0] == 200
        if version == "2":
            assert (await rig.states())["engine-1"] == "SYNCING"
            rig.replicas[1].heal()
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_an_update_that_was_aborted_is_nothing_to_compare_the_next_with(rig: Rig) -> None:
    await rig.open_group()
    token_ids = (await rig.get("/v1/weight_canary"))[1]["token_ids"]
    logprobs = partial(logprobs_of, rig, token_ids)
    assert (await finished(rig, {"canary_logprobs": logprobs("1")}))[0] == 200
    wrong = [-value for value in logprobs("1")]
    status, reply = await finished(rig, {"canary_logprobs": wrong})
    assert (status, "as the trainer's" in reply["error"]["message"]) == (424, True)
    assert (await finished(rig, {"canary_logprobs": logprobs("2")}))[1].get("weight_version") == 2
    assert set((await rig.states()).values()) == {"SERVING"}


@pytest.mark.parametrize("wrong", ["x", [1.0], [None] * 63, ["1"] * 63, [True] * 63, [-1e308] * 63, [1e39] * 63])
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


class Scores:
    """The log-probs of replicas, in nats beside those of the checkpoint: by their weights, and by their batches of four
    or more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: dict[str, float] = defaultdict(float)
        self.batch: dict[str, float] = defaultdict(float)
        self._running: Counter[str] = Counter()
        monkeypatch.setattr(Canary, "_score", lambda _, replica, ids: self.score(replica.replica_id, ids))

    async def score(self, name: str, token_ids: list[int]) -> tuple[float, ...]:
        self._running[name] += 1
        try:
            await asyncio.sleep(0)
            apart = self.weights[name] + self.batch[name] * (self._running[name] >= 4)
            await asyncio.sleep(0)
            return tuple(-1.0 - apart for _ in token_ids[1:])
        finally:
            self._running[name] -= 1


@pytest.fixture
async def played(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> tuple[Canary, Scores, list[Replica]]:
    scores = Scores(monkeypatch)
    rig = await start_rig(3)
    return Canary(CanaryConfig(), {}), scores, list(rig.fleet.replicas)


async def comes_back(canary: Canary, replica: Replica, version: int) -> bool:
    """True where it may serve as a successor that took `version` outside an update."""
    canary.forget(replica)
    return (await canary.admit([replica], version))[replica].may_serve


async def test_a_replica_that_comes_back_damaged_and_noisy_does_not_widen_its_own_tolerance(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    await canary.check(fleet[:2], 1)
    canary.accept()
    scores.weights["engine-2"], scores.batch["engine-2"] = 1.4, 0.5
    assert not await comes_back(canary, fleet[2], 1)
    scores.weights["engine-2"], scores.batch["engine-2"] = 0.1, 0.05
    assert await comes_back(canary, fleet[2], 1)


async def test_the_noise_that_healthy_peers_show_is_believed_of_a_replica_that_comes_back(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    scores.batch.update({"engine-0": 0.2, "engine-1": 0.2, "engine-2": 0.2})
    await canary.check(fleet[:2], 1)
    canary.accept()
    scores.weights["engine-2"] = 0.5
    assert await comes_back(canary, fleet[2], 1)
    scores.weights["engine-2"] = 0.7
    assert not await comes_back(canary, fleet[2], 1)


@pytest.mark.parametrize("noise", ["of a reading of three", "of an aborted update", "of a stranger that is refused"])
async def test_noise_that_let_no_returning_replica_pass_lets_none_pass_later(
    played: tuple[Canary, Scores, list[Replica]], noise: str
) -> None:
    canary, scores, fleet = played
    match noise:
        case "of a reading of three":
            scores.batch["engine-1"] = 5.0
            findings = await canary.check(fleet, 1)
            canary.accept()
        case "of an aborted update":
            scores.batch.update({"engine-0": 0.9, "engine-1": 0.9, "engine-2": 0.9})
            findings = await canary.check(fleet, 1)
        case _:
            scores.batch["engine-2"] = 0.9
            findings = await canary.admit(fleet[2:], 1)
            canary.forget(fleet[2])
    assert all(finding.may_serve for finding in findings.values())
    scores.batch.clear()
    await canary.check(fleet, 2)
    canary.accept()
    scores.weights["engine-2"] = 0.1
    assert not await comes_back(canary, fleet[2], 2)


@pytest.mark.parametrize("noise", [0.3, 5.0])
async def test_noise_that_a_replica_showed_at_an_earlier_version_does_not_widen_its_tolerance(
    played: tuple[Canary, Scores, list[Replica]], noise: float
) -> None:
    canary, scores, fleet = played
    scores.batch["engine-2"] = noise  # the median of three tolerates it
    await canary.check(fleet, 1)
    canary.accept()
    scores.weights |= {"engine-0": 3.0, "engine-1": 3.0}
    await canary.check(fleet[:2], 2)
    canary.accept()
    scores.batch["engine-2"], scores.weights["engine-2"] = 0.0, 3.0 + 2.9 * noise
    assert not (await canary.admit(fleet[2:], 2))[fleet[2]].may_serve


async def test_a_replica_is_no_peer_of_its_own_that_makes_its_noise_usual(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    scores.batch["engine-1"] = 5.0
    await canary.check(fleet[:2], 1)
    canary.accept()
    scores.weights["engine-1"] = 10.0
    assert not (await canary.admit([fleet[1]], 1))[fleet[1]].may_serve


async def test_a_kind_that_is_noisy_by_nature_is_borne_out_after_a_restart_of_the_gateway(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    scores.batch |= {"engine-0": 0.2, "engine-1": 0.2, "engine-2": 0.2}
    scores.weights["engine-1"] = 0.2
    assert all(finding.may_serve for finding in (await canary.admit(fleet, 1)).values())


async def test_a_damaged_and_noisy_replica_does_not_widen_its_own_tolerance_in_its_turn_of_a_rolling_update(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    await canary.check(fleet, 1)
    canary.accept()
    scores.weights |= {"engine-0": 0.2, "engine-1": 0.2, "engine-2": 2.8}
    scores.batch["engine-2"] = 1.0
    passed = []
    for replica in fleet:
        passed.append((await canary.check([replica], 2, busy=True))[replica].may_serve)
        canary.accept_part()
    assert passed == [True, True, False]


async def test_noise_that_a_replica_showed_at_an_earlier_version_does_not_widen_its_tolerance_in_its_turn(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    scores.batch["engine-2"] = 1.0  # the median of three tolerates it
    await canary.check(fleet, 1)
    canary.accept()
    scores.weights |= {"engine-0": 3.0, "engine-1": 3.0, "engine-2": 5.0}
    await canary.check(fleet[:2], 2)
    canary.accept_part()
    scores.batch["engine-2"] = 0.0
    assert not (await canary.check(fleet[2:], 2))[fleet[2]].may_serve


@pytest.mark.parametrize("width", [1, 2, 3])
async def test_a_kind_that_is_noisy_by_nature_takes_updates_at_once_and_in_turns(
    played: tuple[Canary, Scores, list[Replica]], width: int
) -> None:
    canary, scores, fleet = played
    scores.batch |= {"engine-0": 0.2, "engine-1": 0.3, "engine-2": 0.2}
    for version in (1, 2, 3):
        scores.weights |= {"engine-0": 3.0 * version, "engine-1": 3.0 * version + 0.2, "engine-2": 3.0 * version - 0.2}
        for first in range(0, len(fleet), width):
            findings = await canary.check(fleet[first : first + width], version)
            assert all(finding.may_serve for finding in findings.values())
            canary.accept_part()


async def test_a_damaged_and_noisy_replica_without_peers_does_not_widen_its_own_tolerance(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    await canary.check(fleet[:1], 1)
    canary.accept()
    scores.weights["engine-0"], scores.batch["engine-0"] = 1.4, 0.5
    assert not (await canary.admit(fleet[:1], 1))[fleet[0]].may_serve


async def test_a_replica_without_peers_that_is_noisy_by_nature_comes_back(
    played: tuple[Canary, Scores, list[Replica]],
) -> None:
    canary, scores, fleet = played
    scores.batch["engine-0"] = 0.2
    await canary.check(fleet[:1], 1)
    canary.accept()
    scores.weights["engine-0"] = 0.5
    assert (await canary.admit(fleet[:1], 1))[fleet[0]].may_serve
    assert await comes_back(canary, fleet[0], 1)


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [({}, Result.VERIFIED), ({"quantization": "fp8"}, Result.NO_PEER), ({"dtype": "bfloat16"}, Result.NO_PEER)],
)
async def test_external_groups_are_peers_unless_their_configuration_names_other_numerics(
    played: tuple[Canary, Scores, list[Replica]], numerics: Json, expected: Result
) -> None:
    _, _, (one, other, _) = played
    server: Json = {"kind": "external", "url": "http://127.0.0.1:1"}
    canary = Canary(
        CanaryConfig(),
        {"one": EngineConfig.model_validate(server), "other": EngineConfig.model_validate(server | numerics)},
    )
    one.info, other.info = replace(one.info, group="one"), replace(other.info, group="other")
    findings = await canary.check([one, other], 1)
    assert {finding.result for finding in findings.values()} == {expected}
