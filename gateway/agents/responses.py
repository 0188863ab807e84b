"""OpenAI's Responses: items become the messages of a turn, an answer becomes items.

Nothing is kept between calls: a client sends its whole history, as Codex does. Reasoning is text, never encrypted.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.agents.pieces import ChatMessages, failure, function, image, named, named_event, objects, refusal
from gateway.agents.turn import Answer, Dialect, Turn, present
from gateway.dialects.fields import read_fields

_NEEDS_STORE = {
    "previous_response_id": "responses are not kept: send the whole history as input",
    "conversation": "conversations are not kept: send the whole history as input",
    "background": "a response is not kept for later: use stream, whose pings keep the connection",
    "prompt": "prompts are not kept: send the text as instructions and input",
}
_ECHOED = ("instructions", "tool_choice", "tools", "temperature", "top_p", "max_output_tokens", "metadata", "text")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = "an item is a message, reasoning, function_call or function_call_output, each with its fields"
_TOOLS = "give function tools, alone or in a namespace; a custom tool fits as a function of one string"


class _Body(msgspec.Struct):
    input: str | list[Any]
    model: str | None = None
    instructions: str = ""
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    include: list[str] = []
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = {}


_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")
_BEGUN = ("response.created", "response.in_progress")


class Responses(Dialect):
    """`store`, `truncation`, `service_tier`, `reasoning.summary` and `client_metadata` have no effect. A tool that
    searches the web is left out: no model is told of it."""

    def read(self, body: Json) -> Turn:
        for name, remedy in _NEEDS_STORE.items():
            if value := body.get(name):
                raise refusal(name, value, remedy)
        given = read_fields(_Body, body)
        if "message.output_text.logprobs" in given.include:
            remedy = "log-probs are in replies of /v1/chat/completions alone: ask there, or leave it out"
            raise refusal("include", "message.output_text.logprobs", remedy)
        if given.max_output_tokens is not None and given.max_output_tokens < 1:
            raise refusal("max_output_tokens", given.max_output_tokens, "give at least 1")
        messages = _messages(given)
        if not messages:
            raise refusal("input", given.input, "give a text, or at least one item")
        namespaces: Json = {}
        tools = list(_tools(given.tools, "tools", namespaces))
        return Turn(
            model=given.model,
            messages=messages,
            tools=tools,
            tool_choice=_tool_choice(given.tool_choice, tools),
            template=_template(given),
            sampling=present(**{name: getattr(given, name) for name in _SAMPLING}),
            max_tokens=given.max_output_tokens,
            streams=given.stream,
            echo={"fields": {name: body.get(name) for name in _ECHOED}, "namespaces": namespaces},
        )

    def begin(self, answer_id: str, turn: Turn) -> bytes:
        response = _response(answer_id, turn.model or "", turn, "in_progress")
        begun = [{"type": kind, "response": response} for kind in _BEGUN]
        return b"".join(_numbered(begun, 0))

    def reply(self, answer: Answer, turn: Turn) -> Json:
        usage = {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # nobody has counted them
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        }
        status = "incomplete" if answer.is_cut else "completed"
        return _response(answer.id, answer.model, turn, status, _items(answer, turn, status), usage)

    def events(self, answer: Answer, turn: Turn) -> Iterator[bytes]:
        return _numbered(_shown(self.reply(answer, turn)), len(_BEGUN))

    def error_event(self, error: RolloutGatewayError) -> bytes:
        status, message = failure(error)
        code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
        response: Json = {"id": "", "object": "response", "status": "failed", "output": []}
        response["error"] = {"code": code, "message": message}
        return b"".join(_numbered([{"type": "response.failed", "response": response}], len(_BEGUN)))


def _messages(given: _Body) -> list[Json]:
    chat = ChatMessages()
    if given.instructions:
        chat.add({"role": "system", "content": given.instructions})
    if isinstance(given.input, str):
        chat.add_user([{"type": "text", "text": given.input}] if given.input else [])
        return chat.all()
    said: Json = {}  # the assistant's message that the last items are parts of
    for where, item in objects(given.input, "input"):
        part = _said(item, where)
        if part is None:
            said = {}
            _add(chat, item, where)
            continue
        if not said or not _goes_on(said, part):
            said = {"role": "assistant", "content": None}
            chat.add(said)
        calls = [*said.get("tool_calls", ()), *part.get("tool_calls", ())]
        said |= part | ({"tool_calls": calls} if calls else {})
    return chat.all()


def _goes_on(said: Json, part: Json) -> bool:
    """True if a part can be of the same answer: reasoning, then text, then calls."""
    if "tool_calls" in part:
        return True
    is_text = part.get("content") is not None
    return not said.get("tool_calls") and said["content"] is None and (is_text or "reasoning" not in said)


def _said(item: Json, where: str) -> Json | None:
    """Return an item of the assistant as a part of its message; None for another item."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            asked = {"name": _flat(item.get("namespace"), name), "arguments": arguments}
            return {"tool_calls": [{"id": call_id, "type": "function", "function": asked}]}
        case {"type": "reasoning"}:
            return {"reasoning": _reasoning(item, where)}
        case {"role": "assistant"} if item.get("type", "message") == "message":
            texts = [part["text"] for part in _parts(item.get("content"), f"{where}.content") if part["type"] == "text"]
            return {"content": "".join(texts)}
    return None


def _reasoning(item: Json, where: str) -> str:
    kind = "content" if item.get("content") else "summary"
    texts = [str(part.get("text", "")) for _, part in objects(item.get(kind) or [], f"{where}.{kind}")]
    if not texts and (hidden := item.get("encrypted_content")):
        raise refusal(f"{where}.encrypted_content", hidden, "another server has encrypted it: leave the item out")
    return "".join(texts)


def _add(chat: ChatMessages, item: Json, where: str) -> None:
    match item:
        case {"type": "function_call_output", "call_id": str(call_id)}:
            parts = _parts(item.get("output"), f"{where}.output")
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            chat.add_result(call_id, text, [part for part in parts if part["type"] != "text"])
        case {"role": "user"} if item.get("type", "message") == "message":
            chat.add_user(_parts(item.get("content"), f"{where}.content"))
        case {"role": str(role)} if item.get("type", "message") == "message" and role in _ROLES:
            parts = _parts(item.get("content"), f"{where}.content")
            chat.add({"role": role, "content": "".join(part["text"] for part in parts if part["type"] == "text")})
        case _:
            raise refusal(where, item, _ITEMS)


def _parts(content: Any, where: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_part(part, place) for place, part in objects(content, where)]


def _part(part: Json, where: str) -> Json:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)} | {
            "type": "refusal",
            "refusal": str(text),
        }:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return image(url)
    raise refusal(where, part, "a part is input_text, output_text, or input_image with its image_url")


def _tools(tools: list[Any], within: str, namespaces: Json, space: str | None = None) -> Iterator[Json]:
    """Yield tools in the form of a chat request. Those of a namespace have its name before theirs; note them in
    `namespaces`."""
    for where, tool in objects(tools, within):
        match tool:
            case {"type": "function", "name": str(name)}:
                if space:
                    namespaces[_flat(space, name)] = {"namespace": space, "name": name}
                described = tool.get("description"), tool.get("parameters")
                yield function(_flat(space, name), *described, where, strict=tool.get("strict"))
            case {"type": "namespace", "name": str(name), "tools": list(inner)} if not space:
                yield from _tools(inner, f"{where}.tools", namespaces, name)
            case {"type": str(kind)} if kind.startswith("web_search"):
                pass
            case _:
                raise refusal(where, tool, _TOOLS)


def _flat(space: str | None, name: str) -> str:
    return f"{space}__{name}" if space else name


def _tool_choice(choice: str | Json, tools: list[Json]) -> str | Json | None:
    match choice:
        case "auto" | "none" | "required":
            return str(choice) if tools else None
        case {"type": "function", "name": name}:
            return named(name, tools, "tool_choice.name")
    raise refusal("tool_choice", choice, "there are auto, none, required, and a function with its name")


def _template(given: _Body) -> Json:
    return present(
        chat_template_kwargs=given.chat_template_kwargs or None,
        parallel_tool_calls=None if given.parallel_tool_calls else False,
        reasoning_effort=given.reasoning.get("effort"),
        response_format=_format(given.text.get("format")),
    )


def _format(asked: Any) -> Json | None:
    match asked:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "name": str(name), "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    raise refusal("text.format", asked, "there are text, json_object, and json_schema with name and schema")


def _response(
    answer_id: str, model: str, turn: Turn, status: str, items: Sequence[Json] = (), usage: Json | None = None
) -> Json:
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **turn.echo["fields"],
        "tools": turn.echo["fields"]["tools"] or [],
        "tool_choice": turn.echo["fields"]["tool_choice"] or "auto",
        "parallel_tool_calls": turn.template.get("parallel_tool_calls", True),
        "store": False,
        "error": None,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items,
        "usage": usage,
    }


def _items(answer: Answer, turn: Turn, last_status: str) -> list[Json]:
    items: list[Json] = []
    if text := answer.message.get("reasoning"):
        thoughts = [{"type": "reasoning_text", "text": text}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": thoughts})
    if text := answer.message.get("content"):
        part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part]})
    for index, call in enumerate(answer.calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        named_so = turn.echo["namespaces"].get(name) or {"name": name}
        called: Json = {"call_id": call["id"], **named_so, "arguments": arguments}
        items.append({"type": "function_call", "id": f"fc_{answer.id}_{index}", **called})
    for place, item in enumerate(items, 1):
        item["status"] = last_status if place == len(items) else "completed"
    return items


def _numbered(events: Iterable[Json], first: int) -> Iterator[bytes]:
    return (named_event(event | {"sequence_number": number}) for number, event in enumerate(events, first))


def _shown(response: Json) -> Iterator[Json]:
    """Yield the events of a whole response."""
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        begun = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
        else:
            yield from _text_shown(item["content"][0], {**at, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _text_shown(part: Json, at: Json) -> Iterator[Json]:
    kind = f"response.{part['type']}"
    more: Json = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **more}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **more}
    yield {"type": "response.content_part.done", **at, "part": part}
