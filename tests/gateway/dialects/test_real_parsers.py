"""Conversations under vLLM's own parsers (CPU) whose engine is killed: told as if it had lived."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.material import tool_model
from tests.rigs.engines.real_vllm import RealFleet, fleet, gathered, standing_amid

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}, "term": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in ("weather", "compute")
]
PARSERS = {"hermes": "1", "qwen3_coder": "2"}
"""What to say to the model, so that it calls tools as this parser reads them."""
LOGPROBS = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}


@dataclass(frozen=True)
class Parsed:
    """A fleet whose engines have a parser of tool calls, one of reasoning, and the question for them."""

    fleet: RealFleet
    question: Json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tool-model")
    tool_model.save(folder)
    return folder


@pytest.fixture(scope="module", params=PARSERS)
def parsed(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parsed]:
    extra = {"reasoning_parser": "qwen3", "tool_call_parser": request.param, "enable_auto_tool_choice": True}
    messages = [{"role": "user", "content": PARSERS[request.param]}]
    question = {"model": str(model), "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    with fleet(model, tmp_path_factory.mktemp("logs"), 2, {"extra": extra, "stream_interval": 4}) as running:
        yield Parsed(running, question)


def whole(real: RealFleet, body: Json) -> Json:
    status, reply = real.call(CHAT, body)
    assert status == 200, reply
    return dict(reply)


def cut_off(real: RealFleet, ask: Callable[[], Json], after: int) -> Json:
    """The reply to a request whose engine is killed when it has made so many tokens. Another starts after it."""
    with ThreadPoolExecutor(1) as pool:
        with gathered(real, 1, after):
            running = pool.submit(ask)
        with standing_amid(real):
            busy = next(one["replica_id"] for one in real.call("/status")[1]["replicas"] if one["samples_in_flight"])
            index = next(place for place, replica in enumerate(real.replicas) if replica.replica_id == busy)
            real.kill(index)
        reply = running.result()
    real.restart(index)
    real.until_serving()
    return reply


def told(reply: Json) -> Json:
    """Return the part of a reply that has to be equal in two replies. Ids of tool calls are drawn."""
    (choice,) = reply["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    message = choice["message"] | {"tool_calls": [call | {"id": ""} for call in calls]}
    entries = choice["logprobs"]["content"] if choice["logprobs"] else []
    names = [(one["token"], one["bytes"], [top["token"] for top in one["top_logprobs"]]) for one in entries]
    fields = {key: choice.get(key) for key in ("finish_reason", "stop_reason", "token_ids")}
    counts = {key: reply["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return fields | {"message": message, "names": names, "read": reply["prompt_token_ids"], "usage": counts}


def logprobs(reply: Json) -> list[float]:
    return [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(("after", "wants"), [(40, LOGPROBS), (150, {}), (200, LOGPROBS), (230, {})])
def test_a_death_is_not_seen(parsed: Parsed, after: int, wants: Json) -> None:
    """In the reasoning, about its end, and within tool calls."""
    asked = parsed.question | wants
    quiet = whole(parsed.fleet, asked)
    (choice,) = quiet["choices"]
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert (choice["finish_reason"], names) == ("tool_calls", ["weather", "compute"])
    assert choice["message"]["reasoning"].startswith("\nthe user wants two things")
    assert "<tool_call>" not in choice["message"]["content"]
    reply = cut_off(parsed.fleet, lambda: whole(parsed.fleet, asked), after)
    assert told(reply) == told(quiet)
    if wants:
        assert logprobs(reply) == pytest.approx(logprobs(quiet), abs=1e-3)
    spans = reply["choices"][0]["weight_versions"]
    ends = [span["end"] for span in spans]
    assert [span["start"] for span in spans] == [0, *ends[:-1]]
    assert ends[-1] == quiet["usage"]["completion_tokens"]


def test_structured_output_is_made_again_as_a_whole(parsed: Parsed) -> None:
    asked = parsed.question | {"tools": None, "structured_outputs": {"regex": r"[\s\S]*"}, "return_token_ids": True}
    quiet = whole(parsed.fleet, asked)
    reply = cut_off(parsed.fleet, lambda: whole(parsed.fleet, asked), 60)
    assert len(reply["choices"][0]["weight_versions"]) == 1
    assert told(reply) == told(quiet)
