"""Real vLLM and real SGLang as replicas of one policy, with a frozen SGLang judge beside them, on CPU."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from examples.tiny_model.train import COMMITTED
from tests import real_sglang, real_vllm

pytestmark = pytest.mark.sglang

USER, ASSISTANT = 2, 3
PROMPTS = [[USER, 5 + digit, 6 + digit, 5, ASSISTANT] for digit in range(8)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real_vllm.RealFleet]:
    log_dir, policy = tmp_path_factory.mktemp("logs"), {"served_model_name": "policy"}
    groups = {
        "vllm": real_vllm.engine_config(COMMITTED, log_dir).model_copy(update=policy),
        "sglang": real_sglang.engine_config(COMMITTED, log_dir, **policy),
        "judge": real_sglang.engine_config(COMMITTED, log_dir, served_model_name="judge", frozen=True),
    }
    with real_vllm.app(groups) as running:
        yield running


def greedy(real: real_vllm.RealFleet, **body: object) -> list[list[int]]:
    asked = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    status, reply = real.call("/v1/completions", asked | body)
    assert status == 200, reply
    return [choice["token_ids"] for choice in reply["choices"]]


def test_both_kinds_answer_for_the_policy_alike(real: real_vllm.RealFleet) -> None:
    tokens = greedy(real)
    placed = {one["replica_id"]: one["samples_placed"] for one in real.call("/status")[1]["replicas"]}
    assert placed == {"judge-0": 0, "sglang-0": 4, "vllm-0": 4}
    assert greedy(real, model="judge") == tokens, "one checkpoint under two names"
    assert [card["id"] for card in real.call("/v1/models")[1]["data"]] == ["policy", "judge"]


def test_a_trainer_is_told_that_their_weights_cannot_be_updated_together(real: real_vllm.RealFleet) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": False}
    assert real.call("/get_world_size") == (200, {"world_size": 2})
    status, reply = real.call("/init_weight_transfer_engine", {"init_info": info})
    assert status == 409
    assert "engines of one kind" in reply["error"]["message"]
    greedy(real)
