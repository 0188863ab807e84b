"""LoRA adapters on real vLLM replicas (CPU) behind a gateway, driven by TRL's own AsyncGRPO client."""

import copy
import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.vllm_client import VLLMClient

from examples.tiny_model.task import COMMITTED
from tests.material.adapters import write_adapter
from tests.rigs.engines.real_vllm import (
    REQUEST_TIMEOUT_S,
    RealFleet,
    app,
    engine_config,
    gathered,
    standing_amid,
)
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

MODEL = str(COMMITTED)
LAYERS, HIDDEN, INNER = 4, 128, 384
PROMPT = [2, 8, 6, 7, 3]
MAX_STALENESS = 1
SCALE = 0.3
"""Added to every weight of the module: enough to change greedy tokens."""
CONVERSATION = {"messages": [{"role": "user", "content": "312"}], "temperature": 0, "max_tokens": 400}
CONVERSATION |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    levers = {"num_replicas": 2, "enable_lora": True, "max_loras": MAX_STALENESS + 2, "max_lora_rank": 8}
    engine = engine_config(COMMITTED, tmp_path_factory.mktemp("logs")).model_copy(update=levers)
    with app({"engine": engine}, weights={"adapter_unload_timeout_s": REQUEST_TIMEOUT_S}) as running:
        yield running


@pytest.fixture(scope="module")
def client(real: RealFleet) -> VLLMClient:
    PartialState(cpu=True)  # its logger wants one
    return VLLMClient(real.url)


def adapter(folder: Path, scale: float) -> Path:
    """One that changes what the tiny model says."""
    return write_adapter(folder, rank=4, layers=LAYERS, sizes=(HIDDEN, INNER), module="mlp.up_proj", scale=scale)


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)


def greedy(url: str, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return list(ask(url, "/v1/completions", body | {"return_token_ids": True})["choices"][0]["token_ids"])


def merged(scale: float) -> list[int]:
    """The answer of transformers for the model with the adapter of this scale merged into it."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight += scale
    ids = torch.tensor([PROMPT])
    for _ in range(8):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return list(ids[0, len(PROMPT) :].tolist())


def on_each(real: RealFleet, model: str) -> list[list[int]]:
    return [greedy(replica.url, model) for replica in real.replicas]


def listed(url: str) -> list[Any]:
    return [card["id"] for card in ask(url, "/v1/models")["data"]]


def test_trl_finds_what_it_asks_of_a_server_before_it_syncs_adapters(client: VLLMClient) -> None:
    client.wait_for_server_ready()
    info = client.get_server_info()
    assert info["lora_config"]["max_loras"] >= MAX_STALENESS + 2
    assert info["lora_config"]["max_lora_rank"] == 8
    assert info["parallel_config"]["data_parallel_size"] == 1


def test_versions_change_both_replicas_and_the_model_beneath_stays_as_it_is(
    real: RealFleet, client: VLLMClient, tmp_path: Path
) -> None:
    base = greedy(real.url, MODEL)
    seen = [base]
    for version, scale in ((1, SCALE), (2, -SCALE)):
        name = f"trl-policy-v{version}"
        folder = adapter(tmp_path / name, scale)
        client.pause()
        client.load_lora_adapter(name, str(folder))
        client.resume()
        tokens = greedy(real.url, name)
        assert tokens == merged(scale)
        assert tokens not in seen
        seen.append(tokens)
        assert on_each(real, name) == [tokens, tokens]
        assert on_each(real, MODEL) == [base, base]
    assert greedy(real.url, "trl-policy-v1") == seen[1]
    assert listed(real.url) == [MODEL, "trl-policy-v1", "trl-policy-v2"]
    client.unload_lora_adapter("trl-policy-v1")
    client.unload_lora_adapter("trl-policy-v1")  # a name that is not there is no error to TRL
    assert real.call("/v1/completions", {"model": "trl-policy-v1", "prompt": PROMPT})[0] == 404
    assert [listed(replica.url) for replica in real.replicas] == [[MODEL, "trl-policy-v2"]] * 2
    assert greedy(real.url, "trl-policy-v2") == seen[2]
    client.unload_lora_adapter("trl-policy-v2")


def test_a_folder_loaded_again_with_other_weights_shares_no_kv_with_the_first(
    real: RealFleet, client: VLLMClient, tmp_path: Path
) -> None:
    prompt = {"prompt": [2, *[5 + i % 10 for i in range(64)], 3], "model": "again", "temperature": 0, "max_tokens": 8}
    prompt |= {"ignore_eos": True, "return_token_ids": True}

    def tokens(url: str) -> list[int]:
        return list(ask(url, "/v1/completions", prompt)["choices"][0]["token_ids"])

    folder = adapter(tmp_path / "again", SCALE)
    client.load_lora_adapter("again", str(folder))
    first = [tokens(real.url) for _ in range(4)]
    other = adapter(tmp_path / "other", -SCALE)
    (folder / "adapter_model.safetensors").write_bytes((other / "adapter_model.safetensors").read_bytes())
    client.unload_lora_adapter("again")
    client.load_lora_adapter("again", str(folder))
    second = [tokens(real.url) for _ in range(4)]
    client.unload_lora_adapter("again")
    # Under a name of its own nothing can have been left of the first.
    client.load_lora_adapter("fresh", str(other))
    prompt["model"] = "fresh"
    assert second == [tokens(real.url)] * 4
    assert second != first
    client.unload_lora_adapter("fresh")


def test_a_prompt_is_scored_beside_rollouts_of_an_adapter(real: RealFleet, client: VLLMClient, tmp_path: Path) -> None:
    client.load_lora_adapter("beside", str(adapter(tmp_path / "beside", SCALE)))
    rollout = {"model": "beside", "prompt": [PROMPT] * 8, "max_tokens": 480, "ignore_eos": True}
    scored = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        with gathered(real, 8):
            running = pool.submit(ask, real.url, "/v1/completions", rollout)
        with standing_amid(real):
            scoring = pool.submit(ask, real.replicas[0].url, "/v1/completions", scored)
        found = [scoring.result()["choices"][0]["prompt_logprobs"]]
        assert not running.done()
        assert len(running.result()["choices"]) == 8
    found.append(ask(real.replicas[0].url, "/v1/completions", scored)["choices"][0]["prompt_logprobs"])
    beside, alone = ([next(iter(one.values()))["logprob"] for one in told[1:]] for told in found)
    assert beside == pytest.approx(alone, abs=1e-3)
    client.unload_lora_adapter("beside")


def test_an_adapter_that_vllm_cannot_load_is_on_neither_replica(
    real: RealFleet, client: VLLMClient, tmp_path: Path
) -> None:
    wrong = write_adapter(tmp_path / "wrong", rank=4, layers=1, module="mlp.no_such_projection")
    with pytest.raises(Exception, match=r"Request failed: 424, .*replica engine-"):
        client.load_lora_adapter("wrong", str(wrong))
    assert [listed(replica.url) for replica in real.replicas] == [[MODEL]] * 2
    assert len(greedy(real.url, MODEL)) == 8


def test_an_adapter_of_another_size_is_refused_which_vllm_alone_takes(
    real: RealFleet, client: VLLMClient, tmp_path: Path
) -> None:
    wrong = write_adapter(tmp_path / "wrong", rank=4, layers=1, sizes=(7, 7), module="mlp.up_proj", scale=1.0)
    with pytest.raises(Exception, match=r"Request failed: 400, .*is it another model's adapter"):
        client.load_lora_adapter("wrong", str(wrong))
    body = json.dumps({"lora_name": "wrong", "lora_path": str(wrong)}).encode()
    for route in ("load_lora_adapter", "unload_lora_adapter"):
        url = f"{real.replicas[0].url}/v1/{route}"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            assert response.status == 200


def base_and(scale: float, seed: int | None = None) -> Any:
    """The base model, drawn from `seed` where one is given, and what it is with the adapter of this scale in it."""
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if seed is not None:
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_config(base.config, dtype=torch.float32)
    both = copy.deepcopy(base)
    with torch.no_grad():
        for layer in both.model.layers:
            layer.mlp.up_proj.weight += scale
    return base, both


def is_greedy(model: Any, read: list[int], made: list[int]) -> bool:
    """Return True if each token is as likely as any after the tokens before it, but for rounding."""
    with torch.no_grad():
        scores = model(torch.tensor([read + made])).logits[0, len(read) - 1 : -1]
    chosen = scores.gather(-1, torch.tensor(made).unsqueeze(-1)).squeeze(-1)
    return bool((scores.max(-1).values - chosen < 1e-3).all())


def conversation(real: RealFleet, model: str) -> Any:
    status, reply = real.call("/v1/chat/completions", CONVERSATION | {"model": model})
    assert status == 200, reply
    return reply


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), 5], ids=["the same base", "another base"])
def test_conversations_go_on_with_their_adapter_over_an_update_of_the_base(
    real: RealFleet, client: VLLMClient, tmp_path: Path, seed: int | None
) -> None:
    client.load_lora_adapter("run-v1", str(adapter(tmp_path / "v1", SCALE)))
    quiet = conversation(real, "run-v1")["choices"][0]
    (_, old), (base, new) = base_and(SCALE), base_and(SCALE, seed)
    with BlockingRolloutClient(real.url) as pusher, WeightSender(pusher, transport="store") as sender:
        served = sender.push(base_and(0.0)[0])  # a canary before it, which engines that stand still would not answer
        with ThreadPoolExecutor(3) as pool:
            with gathered(real, 2):
                running = [pool.submit(conversation, real, "run-v1") for _ in range(2)]
            with standing_amid(real):
                pushing = pool.submit(sender.push, base, in_flight="recompute")
                client.load_lora_adapter("run-v2", str(adapter(tmp_path / "v2", -SCALE)))
                assert pushing.result() == served + 1
            replies = [one.result() for one in running]
        again = conversation(real, "run-v1")
        sender.push(base_and(0.0)[0])
    for reply in replies:
        (choice,) = reply["choices"]
        first, second = choice["weight_versions"]
        print(choice["weight_versions"])
        assert (first["version"], first["adapter"], first["base_version"], first["start"]) == (1, "run-v1", served, 0)
        assert (second["version"], second["adapter"], second["base_version"]) == (1, "run-v1", served + 1)
        boundary, ids, read = first["end"], choice["token_ids"], reply["prompt_token_ids"]
        assert 0 < boundary == second["start"] < second["end"] == len(ids) == CONVERSATION["max_tokens"]
        assert is_greedy(old, read, ids[:boundary])
        assert is_greedy(new, read + ids[:boundary], ids[boundary:])
        if seed is None:
            assert (ids, choice["message"]["content"]) == (quiet["token_ids"], quiet["message"]["content"])
    assert is_greedy(new, again["prompt_token_ids"], again["choices"][0]["token_ids"])
    assert (seed is None) == is_greedy(old, again["prompt_token_ids"], again["choices"][0]["token_ids"])
    for name in ("run-v1", "run-v2"):
        client.unload_lora_adapter(name)


def test_the_successor_of_a_killed_engine_has_the_adapter_before_it_serves(
    real: RealFleet, client: VLLMClient, tmp_path: Path
) -> None:
    client.load_lora_adapter("trl-policy-v3", str(adapter(tmp_path / "v3", SCALE)))
    tokens = greedy(real.url, "trl-policy-v3")
    real.kill(1)
    assert greedy(real.url, "trl-policy-v3") == tokens
    real.restart(1)
    real.until_serving()
    assert listed(real.replicas[1].url) == [MODEL, "trl-policy-v3"]
    assert on_each(real, "trl-policy-v3") == [tokens, tokens]
    client.unload_lora_adapter("trl-policy-v3")
