"""Changes in vLLM's API servers (0.32 and later): the version of each token, and a pause that ends with its last step.

vLLM counts them itself, exactly, but reports them only with the last tokens of a request, and only on
/inference/v1/generate. Here each choice of /v1/completions and /v1/chat/completions gets `weight_versions`, a list of
{version, start, end}, also where it has a single version: the client cannot know on which side of an update a sample
was made. A stream has them with the first token of each version as well, on all three routes, so that a client whose
server dies knows the version of each token that it has.

Behind a pause vLLM sleeps for 20 ms, so that outputs before it tend to be delivered first. Here nothing asks for that:
their versions are the core's.
"""

import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")
Json = dict[str, Any]

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
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    if not hasattr(OpenAIServingCompletion, _MARK):
        pause_at_once(AsyncLLM)
        count_so_far(RequestState)
        report_spans(OpenAIServingCompletion, OpenAIServingChat)
        setattr(OpenAIServingCompletion, _MARK, True)


def pause_at_once(servers: Any) -> None:
    """Wrap the method of vLLM's `AsyncLLM` that pauses: one that keeps requests and their KV asks the core alone."""
    pause = servers.pause_generation

    @functools.wraps(pause)
    async def paused(self: Any, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if mode != "keep" or clear_cache:
            await pause(self, mode=mode, clear_cache=clear_cache)
        else:
            await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    servers.pause_generation = paused


def count_so_far(requests: Any) -> None:
    """Wrap the method of vLLM's `RequestState` that makes outputs, so that each has the spans of all tokens so far."""
    new_output, spans_of = requests._new_completion_output, requests._weight_version_spans

    @functools.wraps(new_output)
    def output(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = new_output(self, *args, **kwargs)
        made.weight_versions = spans_of(self)
        return made

    requests._new_completion_output = output


def report_spans(completions: Any, chats: Any) -> None:
    """Wrap the methods of vLLM's serving classes that turn outputs into replies."""
    whole, chat = completions.request_output_to_completion_response, chats.chat_completion_full_generator

    @functools.wraps(whole)
    def completion(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = whole(self, final_res_batch, *args, **kwargs)
        _add(response.choices, enumerate(output for result in final_res_batch for output in result.outputs))
        return response

    @functools.wraps(chat)
    async def conversation(self: Any, request: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        last: dict[int, Any] = {}
        noted = _noted(results, lambda result: last.update((output.index, output) for output in result.outputs))
        response = await chat(self, request, noted, *args, **kwargs)
        _add(getattr(response, "choices", ()), last.items())
        return response

    completions.request_output_to_completion_response = completion
    chats.chat_completion_full_generator = conversation
    completions.completion_stream_generator = _with_spans(completions.completion_stream_generator, results_at=1)
    chats.chat_completion_stream_generator = _with_spans(chats.chat_completion_stream_generator, results_at=0)


def _with_spans(stream: Callable[..., AsyncIterator[str]], *, results_at: int) -> Callable[..., AsyncIterator[str]]:
    """Wrap a method that streams events. Its results come so many arguments after the request; those of several prompts
    are numbered by prompt."""

    @functools.wraps(stream)
    async def events(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        spans = StreamSpans()

        def note(made: Any) -> None:
            prompt, result = made if isinstance(made, tuple) else (0, made)
            spans.note(result.outputs, first=prompt and prompt * (request.n or 1))

        noted = (*args[:results_at], _noted(args[results_at], note), *args[results_at + 1 :])
        async for event in stream(self, request, *noted, **kwargs):
            yield spans.added_to(event)

    return events


async def _noted(results: AsyncIterator[T], note: Callable[[T], object]) -> AsyncIterator[T]:
    async for one in results:
        note(one)
        yield one


class StreamSpans:
    """The spans that a stream has still to report: those of a choice with a new version, or at its end.

    To write them into an event costs its decoding, so an event of tokens like those before passes as it is.
    """

    def __init__(self) -> None:
        self._news: dict[int, tuple[list[Json], bool]] = {}  # by choice; True at its end
        self._num_reported: dict[int, int] = {}

    def note(self, outputs: Iterable[Any], *, first: int = 0) -> None:
        """Take the outputs of a prompt whose choices are numbered from `first`, before their events."""
        for output in outputs:
            index, spans, has_ended = first + output.index, output.weight_versions, output.finish_reason is not None
            if spans and (has_ended or len(spans) != self._num_reported.get(index)):
                self._news[index] = _as_json(spans), has_ended
                self._num_reported[index] = len(spans)

    def added_to(self, event: str) -> str:
        """Return a streamed event with the spans that its choices have to report."""
        head, _, data = event.partition("data: ")
        if not self._news or head or not data.startswith("{"):
            return event
        chunk = json.loads(data)
        for choice in chunk.get("choices", ()):
            spans, has_ended = self._news.get(choice["index"], (None, False))
            if spans is None:
                continue
            choice["weight_versions"] = spans
            if choice.get("finish_reason") or not has_ended:  # the event that opens a chat may come before its end
                del self._news[choice["index"]]
        return f"data: {json.dumps(chunk)}\n\n"


def _add(choices: Iterable[Any], outputs: Iterable[tuple[int, Any]]) -> None:
    spans = {index: output.weight_versions for index, output in outputs}
    for choice in choices:
        if found := spans.get(choice.index):
            choice.weight_versions = _as_json(found)


def _as_json(spans: Iterable[Any]) -> list[Json]:
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
