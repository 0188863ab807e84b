"""Real vLLM and real SGLang as replicas of one policy, with a frozen SGLang judge beside them, on CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.config import EngineConfig
from engines.types import Dialect, EngineKind
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines import real_sglang, real_vllm
from tests.rigs.engines.real_trainer import checkpoint, trl_client
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.sglang

USER, ASSISTANT = 2, 3
LONG = 300
PROMPTS = [[USER, 5 + digit, 6 + digit, 5, ASSISTANT] for digit in range(8)]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    log_dir, policy = tmp_path_factory.mktemp("logs"), {"served_model_name": "policy"}
    return {
        "vllm": real_vllm.engine_config(COMMITTED, log_dir).model_copy(update=policy),
        "sglang": real_sglang.engine_config(COMMITTED, log_dir, **policy),
        "judge": real_sglang.engine_config(COMMITTED, log_dir, served_model_name="judge", frozen=True),
    }


@pytest.fixture(scope="module")
def started(groups: dict[str, EngineConfig]) -> Iterator[real_vllm.Engines]:
    with real_vllm.started(groups) as running:
        yield running


@pytest.fixture(scope="module")
def real(groups: dict[str, EngineConfig], started: real_vllm.Engines) -> Iterator[real_vllm.RealFleet]:
    with real_vllm.app(groups, nullcontext(started)) as running:
        yield running


@pytest.fixture
def alone(groups: dict[str, EngineConfig], started: real_vllm.Engines) -> Iterator[real_vllm.RealFleet]:
    """A gateway of its own over the two SGLang servers, which are one policy there; they are left as they were."""
    runner, _, replicas = started
    theirs = [replica for replica in replicas if replica.kind is EngineKind.SGLANG]
    both = [
        replace(replica, replica_id=f"sglang-{place}", group="sglang", model="policy")
        for place, replica in enumerate(theirs)
    ]
    policy = {"sglang": groups["sglang"].model_copy(update={"num_replicas": 2})}
    with real_vllm.app(policy, nullcontext((runner, [], both))) as running:
        yield running
        assert running.call("/reset_prefix_cache", {})[0] == 200
    for replica in both:
        label = {"new_version": "default", "abort_all_requests": False}
        assert replace(running, url=replica.url).call("/update_weight_version", label)[0] == 200


@pytest.fixture(scope="module")
def theirs(real: real_vllm.RealFleet) -> Iterator[real_vllm.RealFleet]:
    """Another gateway, to which the judge's server is one that somebody else runs."""
    (url,) = (replica.url for replica in real.replicas if replica.group == "judge")
    with real_vllm.app({"theirs": EngineConfig(kind=EngineKind.EXTERNAL, url=url)}) as running:
        yield running


def complete(real: real_vllm.RealFleet, **body: object) -> list[Any]:
    asked = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    status, reply = real.call("/v1/completions", asked | body)
    assert status == 200, reply
    return list(reply["choices"])


def greedy(real: real_vllm.RealFleet, **body: object) -> list[list[int]]:
    return [choice["token_ids"] for choice in complete(real, **body)]


def placed(real: real_vllm.RealFleet) -> dict[str, int]:
    return {one["replica_id"]: one["samples_placed"] for one in real.call("/status")[1]["replicas"]}


def random_model(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(COMMITTED), dtype=torch.float32)


def prompt_logprobs(choice: Any, prompt: list[int]) -> list[float]:
    """Log-probs of the prompt's own tokens; the first has none."""
    scored = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
    return [entry[str(token_id)]["logprob"] for entry, token_id in scored]


def check_all_hold(real: real_vllm.RealFleet, model: Any, version: int, replicas: set[str]) -> None:
    before = placed(real)
    for prompt, choice in zip(PROMPTS, complete(real), strict=True):
        assert is_greedy(model, prompt, choice["token_ids"])
        assert {span["version"] for span in choice["weight_versions"]} == {version}
    assert all(placed(real)[one] > before[one] for one in replicas), "each has answered some"


def check_relayed(real: real_vllm.RealFleet, model: Any, version: int, replicas: set[str]) -> None:
    check_all_hold(real, model, version, replicas)
    record = real.call("/v1/weight_updates")[1]["weight_updates"][0]
    assert (record["version"], record["transport"], record["end"]) == (version, "relay", "committed")
    assert set(record["replicas"]) == replicas


@pytest.mark.slow
def test_trls_client_updates_sglang_alone_through_the_relay(alone: real_vllm.RealFleet) -> None:
    """It comes before the other gateway, which would bring back what another has updated."""
    other, both = random_model(seed=5), {"sglang-0", "sglang-1"}
    assert alone.call("/get_world_size") == (200, {"world_size": 1})
    with trl_client(alone.url) as client, ThreadPoolExecutor(1) as pool:
        assert alone.call("/status")[1]["weight_relay"]["in_group"]
        with real_vllm.gathered(alone, len(PROMPTS)):
            running = pool.submit(complete, alone, max_tokens=LONG, ignore_eos=True, temperature=1.0)
        with real_vllm.standing_amid(alone):
            client.update_model_params(other)
        whole = running.result(timeout=real_vllm.REQUEST_TIMEOUT_S)
        spans = [[(span["version"], span["start"], span["end"]) for span in one["weight_versions"]] for one in whole]
        print(spans)
        assert {len(one["token_ids"]) for one in whole} == {LONG}
        assert all([*told[0][:2], told[-1][0], told[-1][2]] == [0, 0, 1, LONG] for told in spans)
        check_relayed(alone, other, 1, both)
        client.update_model_params(checkpoint())
        check_relayed(alone, checkpoint(), 2, both)


def test_both_kinds_answer_for_the_policy_alike(real: real_vllm.RealFleet) -> None:
    tokens = greedy(real)
    assert placed(real) == {"judge-0": 0, "sglang-0": 4, "vllm-0": 4}
    assert greedy(real, model="judge") == tokens, "one checkpoint under two names"
    assert [card["id"] for card in real.call("/v1/models")[1]["data"]] == ["policy", "judge"]


def test_logprobs_are_those_of_the_other_kind(real: real_vllm.RealFleet) -> None:
    before = placed(real)
    asked = {"logprobs": 1, "prompt_logprobs": 0}
    mixed, judged = complete(real, **asked), complete(real, model="judge", **asked)
    assert all(placed(real)[replica_id] > before[replica_id] for replica_id in before), "each kind has answered some"
    for prompt, one, other in zip(PROMPTS, mixed, judged, strict=True):
        assert one["prompt_token_ids"] == other["prompt_token_ids"] == prompt
        assert len(one["logprobs"]["token_logprobs"]) == len(one["token_ids"])
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
        assert prompt_logprobs(one, prompt) == pytest.approx(prompt_logprobs(other, prompt), abs=1e-3)


def test_sglang_takes_no_token_ids_in_vllms_dialect(real: real_vllm.RealFleet) -> None:
    """The judge is SGLang, which lacks the route."""
    status, reply = real.call("/inference/v1/generate", {"model": "judge", "token_ids": [5], "sampling_params": {}})
    assert (status, "is served by vLLM" in reply["error"]["message"]) == (404, True)


def is_greedy(model: Any, prompt: list[int], token_ids: list[int]) -> bool:
    """Return True if each token is the likeliest after the tokens before it."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt + token_ids])).logits[0]
    return bool((scores[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(token_ids)).all())


def test_weights_pushed_through_the_store_reach_both_kinds_and_a_successor(real: real_vllm.RealFleet) -> None:
    model = random_model()
    judged = greedy(real, model="judge")
    with BlockingRolloutClient(real.url) as client, WeightSender(client, transport="store") as sender:
        assert sender.push(model) == 1
    both = {"vllm-0", "sglang-0"}
    check_all_hold(real, model, 1, both)
    (index,) = (place for place, replica in enumerate(real.replicas) if replica.group == "sglang")
    real.restart(index)
    real.until_serving()
    check_all_hold(real, model, 1, both)
    assert greedy(real, model="judge") == judged


def test_what_a_death_cuts_off_goes_on_at_the_other_kind(real: real_vllm.RealFleet) -> None:
    model = checkpoint()
    with BlockingRolloutClient(real.url) as client, WeightSender(client, transport="store") as sender:
        served = sender.push(model)
    asked = {"max_tokens": LONG, "ignore_eos": True, "logprobs": 0}
    (index,) = (place for place, replica in enumerate(real.replicas) if replica.group == "vllm")
    vllm = replace(real, replicas=[real.replicas[index]])
    with ThreadPoolExecutor(1) as pool:
        with real_vllm.gathered(vllm, len(PROMPTS) // 2):
            running = pool.submit(complete, real, **asked)
        with real_vllm.standing_amid(vllm):
            real.kill(index)
        choices = running.result(timeout=real_vllm.REQUEST_TIMEOUT_S)
    real.restart(index)
    real.until_serving()
    for prompt, choice in zip(PROMPTS, choices, strict=True):
        assert choice["weight_versions"] == [{"version": served, "start": 0, "end": LONG}]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", LONG)
        assert len(choice["logprobs"]["token_logprobs"]) == LONG
        assert is_greedy(model, prompt, choice["token_ids"][:16])
        assert choice["prompt_token_ids"] == prompt


def test_trls_client_updates_both_kinds_through_the_relay(real: real_vllm.RealFleet) -> None:
    served, model = real.call("/status")[1]["weight_version"], random_model(seed=4)
    with trl_client(real.url) as client:
        client.update_model_params(model)
        client.reset_prefix_cache()
        assert client.weight_version == served + 1
    check_relayed(real, model, served + 1, {"vllm-0", "sglang-0"})


def test_an_external_sglang_server_is_spoken_to_as_our_own(
    real: real_vllm.RealFleet, theirs: real_vllm.RealFleet
) -> None:
    (replica,) = theirs.replicas
    assert (replica.kind, replica.dialect, replica.takes_weights) == (EngineKind.EXTERNAL, Dialect.SGLANG, True)
    asked = {"model": "judge", "logprobs": 1, "prompt_logprobs": 0}
    ours, found = complete(real, **asked), complete(theirs, **asked)
    assert [choice["token_ids"] for choice in found] == [choice["token_ids"] for choice in ours]
    assert found[0]["logprobs"]["token_logprobs"] == pytest.approx(ours[0]["logprobs"]["token_logprobs"], abs=1e-4)
    assert {span["version"] for choice in found for span in choice["weight_versions"]} == {0}
    assert theirs.call("/pause?mode=keep", {})[0] == 200
    assert theirs.call("/resume", {})[0] == 200
    assert theirs.call("/reset_prefix_cache", {})[0] == 200


def test_an_external_sglang_server_takes_weights_from_trls_client(theirs: real_vllm.RealFleet) -> None:
    before = greedy(theirs)
    with trl_client(theirs.url) as client:
        client.update_model_params(random_model())
        after = complete(theirs)
        assert [choice["token_ids"] for choice in after] != before
        assert {span["version"] for choice in after for span in choice["weight_versions"]} == {1}
        client.update_model_params(checkpoint())
        assert greedy(theirs) == before, "the weights that it came with, sent back"
