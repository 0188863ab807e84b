"""Spans of completions in vLLM's replies, with played serving classes; real ones are in the conformance suite."""

import inspect
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm.spans import pause_at_once, report_spans

MIXED = [("1", 0, 3), ("2", 3, 8)]
WHOLE = [("1", 0, 8)]
TOLD_WHOLE = [{"version": "1", "start": 0, "end": 8}]
TOLD = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 8}]


def output(index: int, spans: Any, finish_reason: str | None = "length") -> SimpleNamespace:
    told = spans and [SimpleNamespace(version=version, start=start, end=end) for version, start, end in spans]
    return SimpleNamespace(index=index, weight_versions=told, finish_reason=finish_reason if spans else None)


def result(*outputs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(outputs=list(outputs))


class Completions:
    def request_output_to_completion_response(self, final_res_batch: list[Any], request: Any) -> Any:
        count = sum(len(one.outputs) for one in final_res_batch)
        return SimpleNamespace(choices=[SimpleNamespace(index=index) for index in range(count)])

    async def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, request_id: str
    ) -> AsyncIterator[str]:
        async for prompt_index, one in result_generator:
            for out in one.outputs:
                index = out.index + prompt_index * request.n
                choice = {"index": index, "text": "é", "finish_reason": out.finish_reason}
                yield f"data: {json.dumps({'id': request_id, 'choices': [choice]})}\n\n"
        yield 'data: {"choices": [], "usage": {}}\n\n'
        yield "data: [DONE]\n\n"


class Chats:
    async def chat_completion_full_generator(self, request: Any, result_generator: Any) -> Any:
        async for one in result_generator:
            last = one
        return SimpleNamespace(choices=[SimpleNamespace(index=out.index) for out in last.outputs])

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, request_id: str
    ) -> AsyncIterator[str]:
        async for one in result_generator:
            for out in one.outputs:
                choice = {"index": out.index, "delta": {}, "finish_reason": out.finish_reason}
                yield f"data: {json.dumps({'id': request_id, 'choices': [choice]})}\n\n"


@pytest.fixture
def serving() -> SimpleNamespace:
    class FreshCompletions(Completions):
        pass

    class FreshChats(Chats):
        pass

    report_spans(FreshCompletions, FreshChats)
    return SimpleNamespace(completions=FreshCompletions(), chats=FreshChats())


async def each(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def told(choices: list[Any]) -> list[Any]:
    return [getattr(choice, "weight_versions", None) for choice in choices]


def test_a_whole_reply_tells_of_each_choice_that_has_ended(serving: Any) -> None:
    batch = [result(output(0, WHOLE), output(1, MIXED)), result(output(0, None), output(1, MIXED))]
    response = serving.completions.request_output_to_completion_response(batch, None)
    assert told(response.choices) == [TOLD_WHOLE, TOLD, None, TOLD]


async def test_a_chat_tells_too(serving: Any) -> None:
    results = each(result(output(0, None)), result(output(1, MIXED), output(0, WHOLE)))
    response = await serving.chats.chat_completion_full_generator(None, results)
    assert told(response.choices) == [TOLD, TOLD_WHOLE]


async def test_a_stream_reports_a_version_with_its_first_token_and_at_the_end(serving: Any) -> None:
    parts = ([("1", 0, 1)], [("1", 0, 5)], [("1", 0, 6), ("2", 6, 9)], [("1", 0, 6), ("2", 6, 12)])
    results = [(0, result(output(0, part, None))) for part in parts] + [(0, result(output(0, [*parts[3]])))]
    request = SimpleNamespace(n=1)
    wrapped = serving.completions.completion_stream_generator(request, [], each(*results), "r")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] async for event in wrapped if '"index"' in event]
    reported = [choice.get("weight_versions") for choice in choices]
    assert [spans and [(one["version"], one["start"], one["end"]) for one in spans] for spans in reported] == [
        parts[0], None, parts[2], None, parts[3],
    ]  # fmt: skip


async def test_a_streamed_chat_tells_too(serving: Any) -> None:
    results = each(result(output(0, None)), result(output(1, MIXED), output(0, WHOLE)))
    events = [event async for event in serving.chats.chat_completion_stream_generator(None, results, "r")]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [choice.get("weight_versions") for choice in choices] == [None, TOLD, TOLD_WHOLE]


def test_the_installed_vllm_tells_no_versions_by_itself_in_openais_dialects_nor_before_a_request_ends() -> None:
    """Where this fails, `report_spans` or `count_so_far` may go."""
    completions = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    chats = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    requests = pytest.importorskip("vllm.v1.engine.output_processor")
    choices = [
        getattr(where, f"{name}Response{kind}Choice")
        for where, name in ((completions, "Completion"), (chats, "ChatCompletion"))
        for kind in ("", "Stream")
    ]
    assert not any("weight_versions" in choice.model_fields for choice in choices)
    made = inspect.getsource(requests.RequestState._new_completion_output)
    assert "weight_versions=self._weight_version_spans() if finished else None" in made


async def test_a_pause_that_keeps_requests_and_their_kv_ends_with_the_last_step() -> None:
    calls: list[Any] = []

    class Servers:
        def __init__(self) -> None:
            self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause_core)

        async def pause_core(self, **asked: Any) -> None:
            calls.append(("core", asked))

        async def pause_generation(self, **asked: Any) -> None:
            calls.append(("as ever", asked))

    pause_at_once(Servers)
    asked = [
        {"mode": "keep", "clear_cache": False}, {"mode": "keep", "clear_cache": True},
        {"mode": "abort", "clear_cache": False},
    ]  # fmt: skip
    for one in asked:
        await Servers().pause_generation(**one)
    assert calls == list(zip(("core", "as ever", "as ever"), asked, strict=True))
