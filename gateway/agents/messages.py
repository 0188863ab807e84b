"""Anthropic's Messages: a body becomes a turn as in vLLM 0.32, but for four things.

Tools do not come and go by system messages. Arguments keep their characters; the results of tools stand together,
before their images; a body that ends in the assistant's own words is refused.
"""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.raw_json import NO_JSON, decoded
from gateway.agents.pieces import ChatMessages, failure, function, image, named, named_event, objects, refusal
from gateway.agents.turn import Answer, Dialect, Turn, present
from gateway.dialects.fields import read_fields

# Claude Code's first block may hold a hash of the request: no two prompts would have a prefix in common.
_BILLING = "x-anthropic-billing-header"
# Under this name Anthropic's documents hand back arguments that are no JSON object.
_NO_OBJECT = "INVALID_JSON"
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS = "a user has text, image and tool_result, the assistant text, thinking and tool_use, each with its fields"


class _Body(msgspec.Struct):
    model: str
    messages: list[Any]
    max_tokens: int | None = None
    system: str | list[Any] = ""
    tools: list[Any] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class Messages(Dialect):
    """`metadata`, `cache_control`, `context_management`, `is_error` and betas have no effect."""

    ping = named_event({"type": "ping"})

    def read(self, body: Json) -> Turn:
        if type(limit := body.get("max_tokens")) is not int or limit < 1:
            raise refusal("max_tokens", limit, "give the most tokens of the answer, at least 1")
        turn = self.read_prompt(body)
        if turn.messages[-1]["role"] == "assistant":
            where = f"messages[{len(body['messages']) - 1}].role"
            raise refusal(where, "assistant", "an answer does not go on in the assistant's words: end with a user's")
        return turn

    def read_prompt(self, body: Json) -> Turn:
        """Return what a body asks for that may lack a limit: its tokens are counted alone."""
        given = read_fields(_Body, body)
        messages = _messages(given)
        if not messages:
            raise refusal("messages", given.messages, "give at least one message")
        tools = [_tool(tool, where) for where, tool in objects(given.tools, "tools")]
        budget, sampling = _budget(given.thinking), {name: getattr(given, name) for name in _SAMPLING}
        return Turn(
            model=given.model,
            messages=messages,
            tools=tools,
            tool_choice=_tool_choice(given.tool_choice, tools),
            template=_template(given),
            sampling=present(**sampling, stop=given.stop_sequences or None, thinking_token_budget=budget),
            max_tokens=given.max_tokens,
            streams=given.stream,
        )

    def begin(self, answer_id: str, turn: Turn) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return named_event({"type": "message_start", "message": _message(answer_id, turn.model or "", [], usage)})

    def reply(self, answer: Answer, turn: Turn) -> Json:
        return _message(answer.id, answer.model, _content(answer), _usage(answer)) | _end(answer)

    def events(self, answer: Answer, turn: Turn) -> Iterator[bytes]:
        for index, block in enumerate(_content(answer)):
            start, deltas = _parts(block)
            yield named_event({"type": "content_block_start", "index": index, "content_block": start})
            for delta in deltas:
                yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_event({"type": "content_block_stop", "index": index})
        yield named_event({"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)})
        yield named_event({"type": "message_stop"})

    def error(self, error: RolloutGatewayError) -> Json:
        status, message = failure(error)
        other = "invalid_request_error" if status < 500 else "api_error"
        return {"type": "error", "error": {"type": _TYPES.get(status, other), "message": message}}

    def error_event(self, error: RolloutGatewayError) -> bytes:
        return named_event(self.error(error))


def _messages(given: _Body) -> list[Json]:
    chat = ChatMessages()
    if text := _system_text(given.system, "system"):
        chat.add({"role": "system", "content": text})
    for where, message in objects(given.messages, "messages"):
        content, where = message.get("content"), f"{where}.content"
        match message.get("role"):
            case "user":
                _add_user(chat, _blocks(content, where))
            case "assistant":
                chat.add(_assistant(_blocks(content, where)))
            case "system":
                if text := _system_text(content, where):
                    chat.add({"role": "system", "content": text})
            case role:
                raise refusal(where.replace(".content", ".role"), role, "there are user, assistant and system")
    return chat.all()


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Json]]:
    if isinstance(content, str):
        return iter([(where, {"type": "text", "text": content})])
    return objects(content, where)


def _system_text(content: Any, where: str) -> str:
    texts = []
    for place, block in _blocks(content, where):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append("" if text.startswith(_BILLING) else text)
            case _:
                raise refusal(place, block, "a system message has blocks of text")
    return "".join(texts)


def _add_user(chat: ChatMessages, blocks: Iterator[tuple[str, Json]]) -> None:
    parts: list[Json] = []
    for where, block in blocks:
        match block:
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                chat.add_result(call_id, *_result(block.get("content") or "", f"{where}.content"))
            case {"type": "text", "text": ""}:
                pass
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": dict(source)}:
                parts.append(_image(source, f"{where}.source"))
            case _:
                raise refusal(where, block, _BLOCKS)
    if parts:
        chat.add_user(parts)


def _result(content: Any, where: str) -> tuple[str | list[Json], list[Json]]:
    """Return the content and the images of a tool's result. Tools that it names stay parts, for the template."""
    texts, tools, images = [], [], []
    for place, block in _blocks(content, where):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image", "source": dict(source)}:
                images.append(_image(source, f"{place}.source"))
            case {"type": "tool_reference", "tool_name": str(name)}:
                tools.append({"type": "tool_reference", "name": name})
            case _:
                raise refusal(place, block, "a result has blocks of text, image and tool_reference")
    text = "\n".join(texts)
    return ([{"type": "text", "text": text}] * bool(text) + tools if tools else text), images


def _image(source: Json, where: str) -> Json:
    match source:
        case {"type": "url", "url": str(url)}:
            return image(url)
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return image(f"data:{kind};base64,{data}")
    raise refusal(where, source, "give base64 with media_type and data, or a url")


def _assistant(blocks: Iterator[tuple[str, Json]]) -> Json:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass  # another model's, which nobody else can read
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(given)}:
                asked = {"name": name, "arguments": _arguments(given)}
                calls.append({"id": call_id, "type": "function", "function": asked})
            case _:
                raise refusal(where, block, _BLOCKS)
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(given: Json) -> str:
    if given.keys() == {_NO_OBJECT} and isinstance(given[_NO_OBJECT], str):
        return str(given[_NO_OBJECT])
    return json.dumps(given, ensure_ascii=False)


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        remedy = "the model cannot call a tool of Anthropic's servers: give one of your own, with input_schema"
        raise refusal(f"{where}.type", tool["type"], remedy)
    deferred = tool.get("defer_loading") or None
    described = tool.get("description"), tool.get("input_schema")
    return function(tool.get("name"), *described, where, strict=tool.get("strict"), defer_loading=deferred)


def _tool_choice(choice: Json, tools: list[Json]) -> str | Json | None:
    match choice:
        case {"type": "tool", "name": name}:
            return named(name, tools, "tool_choice.name")
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind] if tools else None
        case {} if not choice:
            return "auto" if tools else None
    raise refusal("tool_choice", choice, "its type is auto, any, none, or tool with a name")


def _template(given: _Body) -> Json:
    is_off = given.thinking.get("type") == "disabled"
    return present(
        chat_template_kwargs=given.chat_template_kwargs or None,
        parallel_tool_calls=False if given.tool_choice.get("disable_parallel_tool_use") else None,
        reasoning_effort="none" if is_off else given.output_config.get("effort"),
        response_format=_format(given.output_config.get("format")),
    )


def _format(asked: Any) -> Json | None:
    match asked:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    raise refusal("output_config.format", asked, "give json_schema with its schema")


def _budget(thinking: Json) -> int | None:
    if not thinking or thinking.get("type") in ("adaptive", "disabled"):
        return None
    match thinking:
        case {"type": "enabled", "budget_tokens": int(budget)} if budget > 0:
            return budget
    raise refusal("thinking", thinking, "its type is adaptive, disabled, or enabled with budget_tokens")


def _message(answer_id: str, model: str, content: list[Json], usage: Json) -> Json:
    head = {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _content(answer: Answer) -> list[Json]:
    blocks: list[Json] = []
    if thoughts := answer.message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": answer.id})
    if text := answer.message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in answer.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": _input(arguments)})
    return blocks or [{"type": "text", "text": ""}]  # clients read the first block


def _input(arguments: str) -> Json:
    """Arguments as an object. Those that are none reach the client under a name that no tool takes."""
    try:
        given = decoded(arguments or "{}")
    except NO_JSON:
        given = None
    return given if isinstance(given, dict) else {_NO_OBJECT: arguments}


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """The begin of a block in a stream, and what is added to it."""
    match block["type"]:
        case "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
            return {**block, "thinking": "", "signature": ""}, deltas
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            given = json.dumps(block["input"], ensure_ascii=False)
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": given}]


def _end(answer: Answer) -> Json:
    reason, sequence = "end_turn", None
    if answer.is_cut:
        reason = "max_tokens"
    elif answer.message.get("tool_calls"):
        reason = "tool_use"
    elif isinstance(answer.stop_reason, str):
        reason, sequence = "stop_sequence", answer.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Answer) -> Json:
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.num_tokens,
    }
