"""Chat completions inside a session: bodies are nearly turns already."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.raw_json import event
from gateway.agents.pieces import objects, refusal
from gateway.agents.turn import Answer, Dialect, Turn, present
from gateway.api import body_of
from gateway.dialects.fields import read_fields
from gateway.dialects.sampling import check_sampling

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "structured_outputs", "thinking_token_budget", "include_stop_str_in_output",
)  # fmt: skip
_TEMPLATE = (
    "chat_template", "chat_template_kwargs", "reasoning_effort", "parallel_tool_calls", "response_format", "documents",
    "add_generation_prompt", "continue_final_message", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
# What templates read: clients add notes of their own, and a message would no longer equal the one that was answered.
_KEPT = ("role", "content", "name", "tool_call_id", "tools")


class _Body(msgspec.Struct):
    messages: list[Any]
    model: str | None = None
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False


class ChatCompletions(Dialect):
    """Fields that ask for token ids have no effect: the record of the session has them."""

    def read(self, body: Json) -> Turn:
        if (n := check_sampling(body)) != 1:
            raise refusal("n", n, "a turn of a session is one answer: send a request for each")
        given = read_fields(_Body, body)
        if given.logprobs:
            raise refusal("logprobs", True, "log-probs are in the record of the session, not in replies: leave it out")
        messages = [_message(message, where) for where, message in objects(given.messages, "messages")]
        if not messages:
            raise refusal("messages", given.messages, "give at least one message")
        tools = [_tool(tool, where) for where, tool in objects(given.tools, "tools")]
        return Turn(
            model=given.model,
            messages=messages,
            tools=tools,
            tool_choice=(given.tool_choice or "auto") if tools else None,
            template=present(**{name: body.get(name) for name in _TEMPLATE}),
            sampling=present(**{name: body.get(name) for name in _SAMPLING}),
            max_tokens=given.max_completion_tokens or given.max_tokens,
            streams=given.stream,
            echo={"wants_usage": bool(given.stream_options.get("include_usage"))},
        )

    def begin(self, answer_id: str, turn: Turn) -> bytes:
        return _chunk(_head(answer_id, turn.model or "", "chat.completion.chunk"), {"role": "assistant", "content": ""})

    def reply(self, answer: Answer, turn: Turn) -> Json:
        message = {"role": "assistant", "content": answer.message.get("content"), **_reasoning(answer)}
        if calls := answer.calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, **_end(answer)}
        return _head(answer.id, answer.model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer, turn: Turn) -> Iterator[bytes]:
        head = _head(answer.id, answer.model, "chat.completion.chunk")
        if reasoning := _reasoning(answer):
            yield _chunk(head, reasoning)
        if text := answer.message.get("content"):
            yield _chunk(head, {"content": text})
        for index, call in enumerate(answer.calls):
            yield _chunk(head, {"tool_calls": [{"index": index, **call}]})
        yield _chunk(head, {}, **_end(answer))
        if turn.echo["wants_usage"]:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error_event(self, error: RolloutGatewayError) -> bytes:
        return event(body_of(error)) + b"data: [DONE]\n\n"


def _message(message: Json, where: str) -> Json:
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise refusal(f"{where}.role", message.get("role"), "there are system, developer, user, assistant and tool")
    if not isinstance(message.get("content"), str | list | None):
        raise refusal(f"{where}.content", message["content"], "give a text or a list of parts")
    kept = {name: message[name] for name in _KEPT if name in message}
    if isinstance(content := message.get("content"), list):  # vLLM takes texts alone too, and skips those that are null
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        kept["content"] = [part for _, part in objects(parts, f"{where}.content") if part.get("text", "") is not None]
    if kept["role"] == "assistant":
        kept["content"] = message.get("content") or None  # Qwen Code sends "" where none was answered
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        kept["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call, place) for place, call in objects(calls, f"{where}.tool_calls")]
    return kept


def _call(call: Json, where: str) -> Json:
    match call:
        case {"id": str(call_id), "function": {"name": str(name), "arguments": str(arguments)}}:
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    raise refusal(where, call, "a call has an id and a function with its name and arguments")


def _tool(tool: Json, where: str) -> Json:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return tool
    raise refusal(where, tool, "a tool is a function with its name, description and parameters")


def _head(answer_id: str, model: str, kind: str) -> Json:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(time.time()), "model": model}


def _reasoning(answer: Answer) -> Json:
    """The reasoning under vLLM's name, and under the name that older clients read."""
    text = answer.message.get("reasoning")
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _end(answer: Answer) -> Json:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


def _chunk(head: Json, delta: Json, **end: Any) -> bytes:
    return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **end}]})
