"""Weight updates of a real SGLang server with our plugin on CPU: alone, and beside a real vLLM server in one group."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation import vllm_client

from engines.config import EngineConfig
from engines.errors import WeightUpdateFailed
from engines.process.port import free_port
from engines.store.manifest import check_bytes
from engines.transfer.gloo import WeightGroup
from engines.transfer.tensor_bytes import digest_on_host
from engines.types import EngineKind
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines import real_sglang, real_vllm
from tests.rigs.engines.real_vllm import RealFleet
from tests.rigs.waiting import wait_until
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.sglang

USER, ASSISTANT = 2, 3
PROMPTS = [[USER, 5 + digit, 6 + digit, 5, ASSISTANT] for digit in range(8)]
TIMEOUT_S = real_vllm.REQUEST_TIMEOUT_S


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineConfig]:
    """SGLang starts with dummy weights, which are no checkpoint's."""
    log_dir, policy = tmp_path_factory.mktemp("logs"), {"served_model_name": "policy"}
    return {
        "vllm": real_vllm.engine_config(COMMITTED, log_dir).model_copy(update=policy),
        "sglang": real_sglang.engine_config(COMMITTED, log_dir, load_format="dummy", **policy),
    }


@pytest.fixture(scope="module")
def started(groups: dict[str, EngineConfig]) -> Iterator[real_vllm.Engines]:
    with real_vllm.started(groups) as running:
        yield running


@pytest.fixture(scope="module")
def alone(groups: dict[str, EngineConfig], started: real_vllm.Engines) -> Iterator[RealFleet]:
    """A gateway over the SGLang server."""
    runner, _, replicas = started
    theirs = [replica for replica in replicas if replica.kind is EngineKind.SGLANG]
    with real_vllm.app({"sglang": groups["sglang"]}, nullcontext((runner, [], theirs))) as running:
        yield running


def random_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(COMMITTED), dtype=torch.float32)


def complete(fleet: RealFleet) -> list[Any]:
    body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    status, reply = fleet.call("/v1/completions", body)
    assert status == 200, reply
    return list(reply["choices"])


def checksums(fleet: RealFleet) -> Any:
    """SGLang's checksums of its own parameters."""
    (sglang,) = fleet.replicas
    status, reply = replace(fleet, url=sglang.url).call("/weights_checker", {"action": "checksum"})
    assert status == 200, reply
    return reply


def is_greedy(model: Any, prompt: list[int], token_ids: list[int]) -> bool:
    """Return True if each token is the likeliest after the tokens before it."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt + token_ids])).logits[0]
    return bool((scores[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(token_ids)).all())


def serves(fleet: RealFleet, model: Any, version: int) -> None:
    """Check that completions are the model's, and name the version."""
    fleet.until_serving(version)
    for prompt, choice in zip(PROMPTS, complete(fleet), strict=True):
        assert is_greedy(model, prompt, choice["token_ids"])
        assert {span["version"] for span in choice["weight_versions"]} == {version}


def last_update(fleet: RealFleet) -> dict[str, Any]:
    record: dict[str, Any] = fleet.call("/v1/weight_updates")[1]["weight_updates"][0]
    print(record["version"], record["transport"], record["end"], record["seconds"], record["error"])
    return record


def kept_copy(fleet: RealFleet, version: int) -> Path:
    """The folder of a version, once the store has it."""
    deadline = time.monotonic() + TIMEOUT_S
    while version not in (store := fleet.call("/status")[1]["weight_store"])["versions"]:
        assert time.monotonic() < deadline, store
        time.sleep(0.05)
    return next(Path(store["folder"]).glob(f"**/v{version}-*"))


def digests_of(model: Any) -> dict[str, str]:
    return {name: digest_on_host(tensor) for name, tensor in model.named_parameters()}


def announced(model: Any) -> dict[str, Any]:
    tensors = list(model.named_parameters())
    shapes = [list(tensor.shape) for _, tensor in tensors]
    return {"names": [name for name, _ in tensors], "dtype_names": ["float32"] * len(tensors), "shapes": shapes}


def test_the_plugin_is_found_and_plans_every_load(started: real_vllm.Engines) -> None:
    (info,) = (info for info in started[2] if info.kind is EngineKind.SGLANG)
    assert (info.has_tee, info.reload_reason) == (True, "")
    assert "own loader each time" not in Path(info.log_path).read_text()


def test_one_group_updates_vllm_and_sglang(groups: dict[str, EngineConfig], started: real_vllm.Engines) -> None:
    """It comes first: a gateway would bring back what another has updated."""
    with real_vllm.app(groups, nullcontext(started), weights={"relay": "never"}) as mixed:
        mixed.until_serving()
        with BlockingRolloutClient(mixed.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
            for seed in (7, 8):
                model = random_model(seed)
                serves(mixed, model, sender.push(model))
                record = last_update(mixed)
                assert (record["transport"], set(record["replicas"])) == ("gloo", {"vllm-0", "sglang-0"})
        placed = {one["replica_id"]: one["samples_placed"] for one in mixed.call("/status")[1]["replicas"]}
        assert min(placed.values()) > 0, "each kind has answered some"
        (sglang,) = (replica for replica in mixed.replicas if replica.kind is EngineKind.SGLANG)
        # Another gateway begins with version 1 again, by which prefixes are salted.
        assert mixed.call("/reset_prefix_cache", {})[0] == 200
    label = {"new_version": "default", "abort_all_requests": False}
    assert replace(mixed, url=sglang.url).call("/update_weight_version", label)[0] == 200


def test_a_server_that_started_with_dummy_weights_loads_a_version_from_the_store(alone: RealFleet) -> None:
    model = random_model(1)
    with BlockingRolloutClient(alone.url) as client, WeightSender(client, transport="store") as sender:
        version = sender.push(model)
    serves(alone, model, version)
    assert last_update(alone)["transport"] == "store"


def test_a_sender_updates_sglang_over_the_group_and_a_refused_update_is_taken_back(alone: RealFleet) -> None:
    model = random_model(2)
    with BlockingRolloutClient(alone.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        version = sender.push(model)
        serves(alone, model, version)
        assert last_update(alone)["transport"] == "gloo"
        copied = check_bytes(kept_copy(alone, version))
        assert {name: tensor.digest for name, tensor in copied.tensors.items()} == digests_of(model)
        count = len(client.canary_token_ids()) - 1
        served = sender.push(random_model(3), canary_logprobs=[-1.0] * count)  # the distance that is usual
        before = checksums(alone)
        with pytest.raises(WeightUpdateFailed, match="canary"):
            sender.push(model, canary_logprobs=[-1000.0] * count)
    serves(alone, random_model(3), served)
    assert checksums(alone) == before
    assert last_update(alone)["staged"]


def test_weights_with_nan_are_refused_and_end_neither_the_engine_nor_the_rollouts_under_them(alone: RealFleet) -> None:
    model, broken = random_model(2), random_model(3)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    sampled = {"prompt": PROMPTS, "max_tokens": 100, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    with (
        ThreadPoolExecutor(1) as pool,
        BlockingRolloutClient(alone.url) as client,
        WeightSender(client, timeout_s=TIMEOUT_S) as sender,
    ):
        version = sender.push(model)
        rollouts = pool.submit(alone.call, "/v1/completions", sampled)
        until_in_flight(alone)
        with pytest.raises(WeightUpdateFailed, match="canary"):
            sender.push(broken)
        status, reply = rollouts.result(TIMEOUT_S)
    assert status == 200, reply
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [100] * len(PROMPTS)
    serves(alone, model, version)


def until_in_flight(fleet: RealFleet) -> None:
    wait_until(lambda: any(one["samples_in_flight"] for one in fleet.call("/status")[1]["replicas"]), TIMEOUT_S)


def test_trls_client_updates_sglang_without_a_relay(alone: RealFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", gloo_trl.send_packed)
    client = gloo_trl.GlooVLLMClient(alone.url, group_port=free_port(), timeout_s=TIMEOUT_S)
    client.init_communicator("cpu")
    model = random_model(4)
    client.update_model_params(model)
    assert client.weight_version is not None
    serves(alone, model, client.weight_version)
    assert last_update(alone)["transport"] == "gloo"
    client.close_communicator()


def test_a_trainer_that_leaves_in_its_update_costs_nothing_served(alone: RealFleet) -> None:
    before = random_model(5)
    with BlockingRolloutClient(alone.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        version = sender.push(before)
    group = WeightGroup("127.0.0.1", free_port(), 0, 2, TIMEOUT_S)
    info = {"master_address": group._address, "master_port": group._port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(alone.call, "/init_weight_transfer_engine", {"init_info": info | {"packed": True}})
        group.join()
        assert joined.result(TIMEOUT_S)[0] == 200
        assert alone.call("/start_weight_update", {})[0] == 200
        asked = pool.submit(alone.call, "/update_weights", {"update_info": announced(before)})
        real_vllm.until_receiving(alone)
        group.close("the trainer is gone")
        status, reply = asked.result(TIMEOUT_S)
    assert status == 424, reply
    assert "lost the group" in str(reply)
    serves(alone, before, version)
    with BlockingRolloutClient(alone.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        after = random_model(6)
        serves(alone, after, sender.push(after))
