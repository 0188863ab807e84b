"""A session on vLLM (CPU), under its template and parsers: each prompt begins with the ids that were sampled before,
whose log-probs are the model's own."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from tests.material import tool_model
from tests.rigs.engines.real_vllm import RealFleet, fleet
from tests.rigs.sessions import record_at, spans, whole
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

Json = dict[str, Any]
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool-model")
    tool_model.save(folder)
    return folder


@pytest.fixture(scope="module")
def real(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(model, tmp_path_factory.mktemp("logs"), 1, {"extra": PARSERS, "stream_interval": 4}) as running:
        yield running


def asked(real: RealFleet, model: Path, path: str, messages: list[Json], **fields: Any) -> Json:
    body = {"model": str(model), "messages": messages, "max_tokens": 400, "temperature": 0.0, **fields}
    status, reply = real.call(f"/sessions/{path}", body)
    assert status == 200, reply
    return dict(reply)


def calls_of(real: RealFleet, session: str) -> list[Json]:
    return asyncio.run(record_at(real.url, session))[1]


def test_an_answer_that_comes_back_as_words_goes_on_as_the_ids_that_were_sampled(real: RealFleet, model: Path) -> None:
    question = {"role": "user", "content": "1"}
    answer = asked(real, model, "words/v1/messages", [question])["content"]
    assert [block["type"] for block in answer] == ["thinking", "text"]
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with BlockingRolloutClient(real.url) as client, WeightSender(client, transport="store") as sender:
        sender.push(weights)
    spoken = {"role": "assistant", "content": [block for block in answer if block["type"] == "text"]}
    asked(real, model, "words/v1/messages", [question, spoken, {"role": "user", "content": "2"}])
    calls = calls_of(real, "words")
    assert [(call["parent"], call["mask"]) for call in calls] == [(None, None), (0, None)]
    assert whole(calls, 1)[: len(whole(calls, 0))] == whole(calls, 0)
    before, after = (spans(call)[0][0] for call in calls)
    assert after == before + 1
    for number, call in enumerate(calls):
        assert [spans(call)[0][1], spans(call)[-1][2]] == [0, len(call["token_ids"])]
        ids = torch.tensor([whole(calls, number)])
        with torch.no_grad():
            scores = weights(input_ids=ids).logits[0, call["prompt_tokens"] - 1 : -1].log_softmax(-1)
        expected = scores.gather(-1, ids[0, call["prompt_tokens"] :, None])[:, 0]
        assert torch.allclose(torch.tensor(call["logprobs"]), expected, atol=1e-3)


def test_calls_of_tools_are_parsed_and_recorded_in_each_dialect(real: RealFleet, model: Path) -> None:
    question, schema = {"role": "user", "content": "1"}, {"type": "object", "properties": {"town": {"type": "string"}}}
    tools: Any = [{"name": name, "input_schema": schema} for name in ("weather", "compute")]
    answer = asked(real, model, "tools/v1/messages", [question], tools=tools)
    assert [block["name"] for block in answer["content"] if block["type"] == "tool_use"] == ["weather", "compute"]
    tools = [{"type": "function", "function": {"name": one["name"], "parameters": schema}} for one in tools]
    reply = asked(real, model, "tools/v1/chat/completions", [question], tools=tools)
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 2
    first, second = calls_of(real, "tools")
    assert first["token_ids"] == second["token_ids"]
    assert (second["retry_of"], second["finish_reason"]) == (None, "stop")
