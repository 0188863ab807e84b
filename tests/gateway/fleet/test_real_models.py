"""A real policy and a real frozen judge behind one URL, on CPU, with weights that TRL's client sends."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples.tiny_model import task
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_trainer import prompts, trl_client
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    policy = engine_config(COMMITTED, tmp_path_factory.mktemp("logs"))
    judge = policy.model_copy(update={"served_model_name": "judge", "frozen": True})
    with app({"judge": judge, "policy": policy}) as running:
        yield running


def greedy(real: RealFleet, prompts: list[list[int]], **named: str) -> tuple[list[list[int]], set[int]]:
    """Token ids and the weight versions that they are said to be of."""
    body = {"prompt": prompts, "max_tokens": task.MAX_ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
    status, reply = real.call("/v1/completions", body | named)
    assert status == 200, reply
    spans = {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}
    return [choice["token_ids"] for choice in reply["choices"]], spans


def other_weights() -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(COMMITTED), dtype=torch.float32)


def test_the_policy_is_updated_and_the_judge_answers_as_before(real: RealFleet) -> None:
    asked = prompts()
    assert [card["id"] for card in real.call("/v1/models")[1]["data"]] == [str(COMMITTED), "judge"]
    before = greedy(real, asked)
    assert greedy(real, asked, model="judge") == before, "one checkpoint under two names"

    with trl_client(real.url) as client:
        assert real.call("/start_weight_update", {})[0] == 200
        assert greedy(real, asked, model="judge") == before, "in the middle of an update"
        assert real.call("/finish_weight_update", {})[1]["weight_version"] == 0, "nothing was sent"
        client.update_model_params(other_weights())
        client.reset_prefix_cache()

    tokens, versions = greedy(real, asked)
    assert (tokens != before[0], versions) == (True, {1})
    assert greedy(real, asked, model="judge") == before
    status = real.call("/status")[1]
    assert {one["replica_id"]: one["weight_version"] for one in status["replicas"]} == {"judge-0": 0, "policy-0": 1}
    assert all(one["state"] == "SERVING" for one in status["replicas"])
