"""Adds weight versions to completions of vLLM's API server: the version of each token (vLLM 0.32 and later).

vLLM counts them itself, exactly, but reports them only on /inference/v1/generate. Here each choice of /v1/completions
and /v1/chat/completions gets `weight_versions`, a list of {version, start, end}, in its last chunk. A choice of a
single version gets it too: the client cannot know on which side of an update during the request a sample was made.
"""

import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Json = dict[str, Any]
Spans = dict[int, list[Json]]
"""Version spans by the index of a choice."""

_MARK = "_reports_version_spans"


class VersionSpans:
    """ASGI middleware that passes everything on. vLLM loads code into each of its API servers only as middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        try:
            _install()
        except (ImportError, AttributeError) as error:
            # An unknown release of vLLM: it serves without spans, and the gateway reports versions without limits.
            logging.getLogger("vllm.rollout_gateway").warning("completions will have no version spans: %s", error)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def _install() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if not hasattr(OpenAIServingCompletion, _MARK):
        report_spans(OpenAIServingCompletion, OpenAIServingChat)
        setattr(OpenAIServingCompletion, _MARK, True)


def report_spans(completions: Any, chats: Any) -> None:
    """Wrap the methods of vLLM's serving classes that turn outputs into replies."""
    whole, stream, chat, chat_stream = (
        completions.request_output_to_completion_response,
        completions.completion_stream_generator,
        chats.chat_completion_full_generator,
        chats.chat_completion_stream_generator,
    )

    @functools.wraps(whole)
    def completion(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = whole(self, final_res_batch, *args, **kwargs)
        _add(response.choices, counted(output for result in final_res_batch for output in result.outputs))
        return response

    @functools.wraps(stream)
    async def completion_chunks(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        spans: Spans = {}

        async def noted() -> AsyncIterator[Any]:
            async for prompt_index, result in result_generator:
                first = prompt_index * (request.n or 1)
                spans.update({first + index: found for index, found in counted(result.outputs, by_index=True).items()})
                yield prompt_index, result

        async for event in stream(self, request, engine_inputs, noted(), *args, **kwargs):
            yield with_spans(event, spans) if spans else event

    @functools.wraps(chat)
    async def conversation(self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any) -> Any:
        spans: Spans = {}
        response = await chat(self, request, _noted(result_generator, spans), *args, **kwargs)
        _add(getattr(response, "choices", ()), spans)
        return response

    @functools.wraps(chat_stream)
    async def conversation_chunks(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        spans: Spans = {}
        async for event in chat_stream(self, request, _noted(result_generator, spans), *args, **kwargs):
            yield with_spans(event, spans) if spans else event

    completions.request_output_to_completion_response = completion
    completions.completion_stream_generator = completion_chunks
    chats.chat_completion_full_generator = conversation
    chats.chat_completion_stream_generator = conversation_chunks


async def _noted(results: AsyncIterator[Any], spans: Spans) -> AsyncIterator[Any]:
    """Pass results on, and add the spans of outputs that have ended to `spans`."""
    async for result in results:
        spans.update(counted(result.outputs, by_index=True))
        yield result


def counted(outputs: Iterable[Any], *, by_index: bool = False) -> Spans:
    """Return the spans of outputs that have ended, by position in `outputs`, or by their own index with `by_index`."""
    return {
        output.index if by_index else place: [
            {"version": span.version, "start": span.start, "end": span.end} for span in output.weight_versions
        ]
        for place, output in enumerate(outputs)
        if output.weight_versions
    }


def with_spans(event: str, spans: Spans) -> str:
    """Return a streamed event with the spans of choices that end in it, which are removed from `spans`."""
    head, _, data = event.partition("data: ")
    if head or not data.startswith("{"):
        return event
    chunk = json.loads(data)
    for choice in chunk.get("choices", ()):
        if choice.get("finish_reason") and (found := spans.pop(choice["index"], None)):
            choice["weight_versions"] = found
    return f"data: {json.dumps(chunk)}\n\n"


def _add(choices: Iterable[Any], spans: Spans) -> None:
    for choice in choices:
        if found := spans.get(choice.index):
            choice.weight_versions = found
