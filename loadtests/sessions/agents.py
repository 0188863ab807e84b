"""Agents that follow a script: turns with tools, subagents, compactions, rewinds and retries, over plain HTTP.

An agent knows the token ids of every prompt that it sends, since the simulated engine has one token a character and its
template is here once more.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

Json = dict[str, Any]

END = 2
_RETRY_S, _PATIENCE_S, _CALL_S = 0.3, 240.0, 120.0
_RETRIED = (408, 409, 429)
TOOLS = ("bash", "edit", "task")


class Gone(Exception):
    """The session does not take calls any more, or a call has failed for good."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation. A call of a tool is an answer whose text is its only argument."""

    role: str
    text: str
    tool: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt that was answered, and the text of the answer."""

    prompt: list[int]
    text: str


def prompt_ids(said: list[Said], tools: tuple[str, ...]) -> list[int]:
    """Return what the engine's template makes of a conversation."""
    names = ",".join(tools)
    text = f"<|tools|>{names}\n" if tools else ""
    ids = [3 + ord(letter) for letter in text]
    for one in said:
        ids += [3 + ord(letter) for letter in f"<|{one.role}|>{one.text}"]
        ids += [END, 13] if one.role == "assistant" else [13]
    return ids + [3 + ord(letter) for letter in "<|assistant|>"]


@dataclass
class Agent:
    """An agent of one session. `path` is that of its base URL; `answered` is filled as it works."""

    http: aiohttp.ClientSession
    path: str
    key: str
    dialect: str
    draw: random.Random
    max_tokens: int = 96
    name: str = ""
    answered: list[Answered] = field(default_factory=list)
    retried: int = 0

    async def work(self, turns: int, task: str, depth: int = 0) -> None:
        """Have one conversation, of which subagents are parts. Raise `Gone`."""
        tools = TOOLS if self.draw.random() < 0.8 else TOOLS[:1]
        opening = [Said("system", f"You are agent {self.name or 'main'}.\n"), Said("user", task)]
        said = opening
        for turn in range(turns):
            answer = await self.ask(said, tools)
            if not answer.text:
                return  # an answer without words cannot be said again in every dialect
            said = [*said, answer, self._next(answer, turn)]
            chance = self.draw.random()
            if chance < 0.06 and depth == 0:
                await self._subagent(turn, answer)
            elif chance < 0.10:
                said = [opening[0], Said("user", f"Summary: {answer.text}")]
            elif chance < 0.14 and len(said) > 5:
                said = [*said[:-3], Said("user", f"Rather do this: {turn}")] if said[-4].role == "assistant" else said

    def _next(self, answer: Said, turn: int) -> Said:
        result = f"result {turn} of {self.draw.randrange(1_000_000)}\n" * self.draw.randint(1, 3)
        return Said("tool", result, answer.tool, answer.call_id) if answer.tool else Said("user", result)

    async def _subagent(self, turn: int, answer: Said) -> None:
        helper = Agent(self.http, self.path, self.key, self.dialect, self.draw, self.max_tokens, f"helper-{turn}")
        helper.answered = self.answered
        await helper.work(3, f"Help with {answer.text[:20]}", depth=1)
        self.retried += helper.retried

    async def ask(self, said: list[Said], tools: tuple[str, ...]) -> Said:
        """Return the answer, asked for until it comes, as the official clients do."""
        is_greedy = self.draw.random() < 0.5
        streams = self.dialect == "responses" and self.draw.random() < 0.5
        body = _BODIES[self.dialect](said, tools, self.draw)
        body |= {"model": "sim", "temperature": 0 if is_greedy else 1, "stream": streams}
        body["max_output_tokens" if self.dialect == "responses" else "max_tokens"] = self.max_tokens
        leaves_s = self.draw.uniform(0.05, 0.6) if self.draw.random() < 0.001 else None
        text, tool, call_id = _READERS[self.dialect](await self._asked(orjson.dumps(body), streams, leaves_s))
        self.answered.append(Answered(prompt_ids(said, tools), text))
        return Said("assistant", text, tool, call_id)

    async def _asked(self, content: bytes, streams: bool, leaves_s: float | None) -> Json:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        if self.name and self.dialect == "messages":
            headers["X-Claude-Code-Agent-Id"] = self.name
        url, loop = self.path + _PATHS[self.dialect], asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(leaves_s or _CALL_S):
                    async with self.http.post(url, data=content, headers=headers) as response:
                        if response.status == 200:
                            return await (_completed(response) if streams else response.json())
                        reason = f"{response.status} {(await response.read())[:300]!r}"
                        if response.status not in _RETRIED and response.status < 500:
                            raise Gone(reason)
            except TimeoutError:
                reason = "the client left" if leaves_s else "no answer in time"
                leaves_s = None
            except (aiohttp.ClientError, ConnectionError) as error:
                reason = repr(error)
            if loop.time() > deadline:
                raise Gone(reason)
            self.retried += 1
            await asyncio.sleep(_RETRY_S)


async def _completed(response: aiohttp.ClientResponse) -> Json:
    """Return the answer at the end of a stream. Raise `aiohttp.ClientPayloadError` where there is none."""
    async for line in response.content:
        if line.startswith(b'data: {"type":"response.') and b'"output"' in line:
            event = orjson.loads(line[6:])
            if event["type"] in ("response.completed", "response.incomplete"):
                return dict(event["response"])
    raise aiohttp.ClientPayloadError("the stream broke off")


def _messages(said: list[Said], tools: tuple[str, ...], draw: random.Random) -> Json:
    """Words as text or as blocks, by chance, as Claude Code sends the same words."""
    system = said[0].text if draw.random() < 0.5 else [{"type": "text", "text": said[0].text}]
    return {
        "system": system,
        "messages": [_message(one, draw) for one in said[1:]],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in tools],
    }


def _message(one: Said, draw: random.Random) -> Json:
    if one.role == "tool":
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one.call_id, "content": one.text}]}
    if one.tool:
        call = {"type": "tool_use", "id": one.call_id, "name": one.tool, "input": {"text": one.text}}
        return {"role": "assistant", "content": [call]}
    block = {"type": "text", "text": one.text, "cache_control": {"type": "ephemeral"}}
    return {"role": one.role, "content": one.text if draw.random() < 0.5 else [block]}


def _responses(said: list[Said], tools: tuple[str, ...], draw: random.Random) -> Json:
    items: list[Json] = []
    for one in said:
        if one.role == "tool":
            items.append({"type": "function_call_output", "call_id": one.call_id, "output": one.text})
        elif one.tool:
            arguments = json.dumps({"text": one.text}, ensure_ascii=draw.random() < 0.5)
            items.append({"type": "function_call", "call_id": one.call_id, "name": one.tool, "arguments": arguments})
        else:
            kind = "output_text" if one.role == "assistant" else "input_text"
            items.append({"type": "message", "role": one.role, "content": [{"type": kind, "text": one.text}]})
    described = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in tools]
    return {"input": items, "tools": described, "store": False}


def _chat(said: list[Said], tools: tuple[str, ...], draw: random.Random) -> Json:
    messages: list[Json] = []
    for one in said:
        message: Json = {"role": one.role, "content": one.text}
        if one.role == "tool":
            message["tool_call_id"] = one.call_id
        elif one.tool:
            function = {"name": one.tool, "arguments": json.dumps({"text": one.text})}
            calls = [{"id": one.call_id, "type": "function", "function": function}]
            message = {"role": "assistant", "content": draw.choice((None, "")), "tool_calls": calls}
        messages.append(message)
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": name}} for name in tools]}


def _of_messages(reply: Json) -> tuple[str, str, str]:
    for block in reply["content"]:
        if block["type"] == "tool_use":
            return block["input"]["text"], block["name"], block["id"]
    return "".join(block["text"] for block in reply["content"]), "", ""


def _of_responses(reply: Json) -> tuple[str, str, str]:
    for item in reply["output"]:
        if item["type"] == "function_call":
            return json.loads(item["arguments"])["text"], item["name"], item["call_id"]
    return "".join(part["text"] for item in reply["output"] for part in item["content"]), "", ""


def _of_chat(reply: Json) -> tuple[str, str, str]:
    message = reply["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        return json.loads(call["function"]["arguments"])["text"], call["function"]["name"], call["id"]
    return message["content"] or "", "", ""


_PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat": "/v1/chat/completions"}
_BODIES: dict[str, Callable[[list[Said], tuple[str, ...], random.Random], Json]] = {
    "messages": _messages,
    "responses": _responses,
    "chat": _chat,
}
_READERS: dict[str, Callable[[Json], tuple[str, str, str]]] = {
    "messages": _of_messages,
    "responses": _of_responses,
    "chat": _of_chat,
}
