"""The requests of TRL up to 1.10, in its own form and order, to two real vLLM replicas on CPU.

The bodies are those of TRL 1.10's client with other prompts; weights go as `trainer_client.trl_legacy` sends them. The
trainer itself: tests/trainer_client/test_trl_legacy.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import task
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import RealFleet, fleet
from tests.trainer_client.transports.test_real_senders import checkpoint
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

CALLS = json.loads((Path(__file__).parent / "trl_1_10_calls.json").read_text(encoding="utf-8"))["calls"]
_, WITH_IDS, _, CHAT, _, AS_JSON, RESET, CLOSE = CALLS
PROBLEMS = task.some_problems(8)
CLOSE_LOGPROB = 1e-3


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    folder = tmp_path_factory.mktemp("engines")
    with fleet(COMMITTED, folder, gateway={"trl_legacy": True}) as running:
        yield running


def made(real: RealFleet, call: dict[str, Any], **changes: Any) -> Any:
    status, reply = real.call(call["path"], call["body"] and call["body"] | changes, method="POST")
    assert status == 200, reply
    return reply


def greedily(real: RealFleet) -> list[list[int]]:
    """Completions of the problems, twice over so that each replica has some."""
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS] * 2
    greedy = {"max_tokens": task.MAX_ANSWER_TOKENS, "temperature": 0.0, "logprobs": 0, "generation_kwargs": {}}
    reply = made(real, WITH_IDS, prompts=prompts, **greedy)
    assert reply["prompt_ids"] == prompts
    first, second = reply["completion_ids"][: len(PROBLEMS)], reply["completion_ids"][len(PROBLEMS) :]
    assert first == second
    return list(first)


def test_a_run_of_the_old_client_generates_with_the_weights_that_it_sent_last(real: RealFleet, tmp_path: Path) -> None:
    assert real.call("/health/")[0] == 200
    assert real.call("/get_world_size/")[1]["world_size"] >= 1
    assert greedily(real) == task.greedy_token_ids(str(COMMITTED), PROBLEMS)

    new = checkpoint(tmp_path / "new", seed=10)
    weights = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict()
    with BlockingRolloutClient(real.url) as client, WeightSender(client, timeout_s=120.0) as sender:
        assert sender.push(weights) == 1
    assert "True" in made(real, RESET)["message"]
    expected = task.greedy_token_ids(str(new), PROBLEMS)
    assert expected != task.greedy_token_ids(str(COMMITTED), PROBLEMS)
    assert greedily(real) == expected
    assert {one["weight_version"] for one in real.call("/status")[1]["replicas"]} == {1}
    made(real, CLOSE)


def test_scores_are_those_of_transformers(real: RealFleet) -> None:
    with BlockingRolloutClient(real.url) as client, WeightSender(client, timeout_s=120.0) as sender:
        model: Any = AutoModelForCausalLM.from_pretrained(COMMITTED, dtype=torch.float32)
        sender.push(model.state_dict())
    told = made(real, AS_JSON)
    for sequence, start, values, ids in zip(
        AS_JSON["body"]["sequences"],
        AS_JSON["body"]["prompt_lengths"],
        told["logprobs"],
        told["logprob_token_ids"],
        strict=True,
    ):
        with torch.no_grad():
            expected = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
        for position, (ranked, tokens) in enumerate(zip(values, ids, strict=True), start=start):
            assert ranked == pytest.approx(expected[position - 1, tokens].tolist(), abs=CLOSE_LOGPROB)


def test_conversations_are_continued(real: RealFleet) -> None:
    messages = [task.prompt(problem) for problem in PROBLEMS]
    reply = made(real, CHAT, messages=messages, n=1, temperature=0.0, max_tokens=task.MAX_ANSWER_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(COMMITTED)
    assert reply["prompt_ids"] == [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS]
    assert [len(ranked) for ranked in reply["logprobs"]] == [len(ids) for ids in reply["completion_ids"]]
