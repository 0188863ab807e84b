"""The canary over two real vLLM servers on CPU, one of which can be made to keep an old lm_head, as vLLM's does."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_trainer import TIMEOUT_S, trl_client
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config, fleet
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

PATIENT = {"canary": {"timeout_s": 300.0}}
"""A canary beside a full batch takes as long as a busy machine lets it."""

# Runs before anything else in every process of the engine: vLLM then leaves a tied head as its own code leaves it.
_WITHOUT_REPAIR = """
import sys
from importlib.machinery import PathFinder

class Unrepaired:
    def find_spec(self, name, path=None, target=None):
        if name != "engines.inside_vllm.gloo_receiver":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.rebuild_tied_head = lambda model: None
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Unrepaired())
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(COMMITTED)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(COMMITTED).save_pretrained(folder)
    return folder


def moved(model: Any, by: float, seed: int) -> Any:
    """The model after a step of this size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += by * torch.randn(parameter.shape, generator=generator)
    return model


def canaries(real: RealFleet) -> dict[str, Any]:
    """The canary findings of the last update, by replica id."""
    update = real.call("/v1/weight_updates")[1]["weight_updates"][0]
    found = {name: replica["canary"] for name, replica in update["replicas"].items()}
    for name, canary in found.items():
        print(f"version {update['version']} {update['seconds']} {name} {canary}")
    return found


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_healthy_replicas_agree_and_small_updates_show(
    tied: Path, tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    policy = engine_config(tied, tmp_path_factory.mktemp("logs")).model_copy(update={"num_replicas": 2, "dtype": dtype})
    model = AutoModelForCausalLM.from_pretrained(tied)
    with app({"policy": policy}) as real, trl_client(real.url) as client:
        client.update_model_params(model)
        assert {one["result"] for one in canaries(real).values()} == {"unchanged"}
        for step in (1e-2, 1e-3):
            client.update_model_params(moved(model, step, seed=1))
            for one in canaries(real).values():
                assert one["result"] == "verified"
                assert one["to_peers"] <= one["tolerance"] < one["to_previous"]


def test_a_head_that_stays_behind_is_found_and_its_replica_fenced(
    tied: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """vLLM's CPU build computes a tied lm_head with a packed copy that a reload leaves as it was."""
    odd_python = tmp_path_factory.mktemp("odd")
    (odd_python / "sitecustomize.py").write_text(_WITHOUT_REPAIR)
    wrapper = odd_python / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{odd_python}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    good = engine_config(tied, tmp_path_factory.mktemp("logs"))
    odd = good.model_copy(update={"python": str(wrapper)})
    model = AutoModelForCausalLM.from_pretrained(tied)
    groups = {"good": good.model_copy(update={"num_replicas": 2}), "odd": odd}
    with app(groups) as real, trl_client(real.url) as client:
        with pytest.raises(Exception, match="replica odd-0"):  # TRL raises no narrower one
            client.update_model_params(moved(model, 1e-2, seed=1))
        found = canaries(real)
        assert {name: one["result"] for name, one in found.items()} == {
            "good-0": "verified",
            "good-1": "verified",
            "odd-0": "failed",
        }
        assert real.call("/status")[1]["weight_version"] == 0


def test_weights_with_nan_are_refused(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM answers 400 where a log-prob is NaN."""
    policy = engine_config(tied, tmp_path_factory.mktemp("logs"))
    model = AutoModelForCausalLM.from_pretrained(tied)
    with app({"policy": policy}) as real, trl_client(real.url) as client:
        client.update_model_params(model)
        model.model.layers[1].mlp.down_proj.weight.data[0] = float("nan")
        with pytest.raises(Exception, match="canary"):
            client.update_model_params(model)
        (found,) = canaries(real).values()
        assert found["result"] == "failed"
        assert real.until_serving()["weight_version"] == 1


@pytest.mark.parametrize(
    ("transport", "weights"),
    [
        ("gloo", {}),
        pytest.param("gloo", {"stage": "never"}, marks=pytest.mark.slow),
        pytest.param("gloo", {"stage": "never", "store": None}, marks=pytest.mark.slow),  # the next has good weights
        pytest.param("store", {}, marks=pytest.mark.slow),
    ],
)
def test_nan_that_refused_weights_left_in_the_kv_reaches_no_rollout(
    tmp_path: Path, transport: Literal["gloo", "store"], weights: dict[str, Any]
) -> None:
    """vLLM's kernels multiply what they mask by 0, and 0 * NaN is NaN. All blocks are used again after the refusal, and
    most rollouts wait in the engine."""
    model = AutoModelForCausalLM.from_pretrained(COMMITTED, dtype=torch.float32)
    body = {"prompt": list(range(10, 40)), "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    with (
        ThreadPoolExecutor(1) as pool,
        fleet(COMMITTED, tmp_path, num_replicas=1, levers={"max_num_seqs": 16}, weights=PATIENT | weights) as real,
        BlockingRolloutClient(real.url) as client,
        WeightSender(client, transport=transport, timeout_s=TIMEOUT_S) as sender,
    ):
        served = sender.push(model)
        good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        before = pool.submit(real.call, "/v1/completions", body | {"n": 32, "max_tokens": 450})
        until_in_flight(real)
        model.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
        with pytest.raises(Exception, match="canary"):
            sender.push(model)
        model.load_state_dict(good)
        if weights.get("store", "auto") is None:
            assert sender.push(model) == served + 1
        assert real.until_serving()["weight_version"] >= served
        for _ in range(2):
            after = real.call("/v1/completions", body | {"n": 32, "max_tokens": 140})
            assert_finite(after, 140)
        assert_finite(before.result(TIMEOUT_S), 450)
        assert sender.push(model) > served


def until_in_flight(real: RealFleet) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any(one["samples_in_flight"] for one in real.call("/status")[1]["replicas"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_finite(answer: tuple[int, Any], tokens: int) -> None:
    status, reply = answer
    assert status == 200, reply
    logprobs = [one for choice in reply["choices"] for one in choice["logprobs"]["token_logprobs"]]
    assert len(logprobs) == 32 * tokens
    assert None not in logprobs
