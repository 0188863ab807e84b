"""A turn begins with the ids of the call before it, under the real template of Qwen3, or says why it does not."""

import json
import re
from array import array
from dataclasses import replace
from typing import Any

import pytest

from gateway.agents.history import End, History, Prompt, end_of
from gateway.agents.turn import Turn
from tests.rigs.templated import Templated, chat_template, tokenizer

Json = dict[str, Any]
END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"
USER: Json = {"role": "user", "content": "What is here?"}
SYSTEM: Json = {"role": "system", "content": "You are a coder."}


def tool(name: str) -> Json:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Reads.", "parameters": schema}}


TOOLS = [tool("ls"), tool("cat")]
RESULT: Json = {"role": "tool", "tool_call_id": "call_0", "content": "a.py"}
RESULT_TEXT = f"\n<|im_start|>user\n<tool_response>\na.py\n</tool_response>{END}\n{OPENING}"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def user_text(text: str) -> str:
    return f"\n<|im_start|>user\n{text}{END}\n{OPENING}"


class Session:
    """A session of an agent on a model whose answers a test scripts."""

    def __init__(self, family: str = "qwen3") -> None:
        template = chat_template(family)
        self.rendering = Templated.of(template, tokenizer(template))
        self.ids: dict[int, array[int]] = {}
        self.history = History(lambda call: self.ids[call])
        self.ended: list[tuple[int, bytes, End]] = []

    async def prompt(self, turn: Turn) -> Prompt:
        prompt = await self.history.prompt(turn, self.rendering)
        assert prompt is not None
        if prompt.parent is not None:
            before = self.ids[prompt.parent].tolist()
            assert prompt.token_ids[: len(before)] == before
        assert (prompt.parent is None) == (prompt.root_reason is not None)
        return prompt

    async def answered(
        self, turn: Turn, sampled: str | list[int], finish: str = "stop", stop: str | int | None = None
    ) -> Json:
        """Have the model answer a turn. Return the message that its parsers make of this."""
        prompt = await self.prompt(turn)
        token_ids = self.rendering.encoded(sampled) if isinstance(sampled, str) else sampled
        call = len(self.ids)
        self.ids[call] = array("i", prompt.token_ids + token_ids)
        message = parsed(self.rendering.decoded(token_ids).removesuffix(END).removesuffix(str(stop)))
        ended = call, self.history.digest(turn, message), end_of(finish, stop, prompt.token_ids, token_ids)
        self.history.add(*ended)
        self.ended.append(ended)
        return message

    def rest(self, prompt: Prompt) -> str:
        """Return the text of a prompt after the ids of its parent."""
        assert prompt.parent is not None
        return self.rendering.decoded(prompt.token_ids[len(self.ids[prompt.parent]) :])


def parsed(text: str) -> Json:
    """Return a message as vLLM's parsers of Qwen3's reasoning and of Hermes' calls make it."""
    message: Json = {"role": "assistant", "reasoning": None}
    if "</think>" in text:
        reasoning, text = text.split("</think>", 1)
        message["reasoning"] = reasoning.removeprefix("<think>").strip("\n")
    try:
        calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    except ValueError:
        calls = []
    if calls:
        text = text[: text.index("<tool_call>")]
        message["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for index, call in enumerate(calls)
        ]
    return message | {"content": text or None}


@pytest.fixture
def session() -> Session:
    return Session()


def first_turn(**more: Any) -> Turn:
    return Turn(model="m", messages=[SYSTEM, USER], tools=TOOLS, **more)


def following(turn: Turn, *messages: Json) -> Turn:
    return replace(turn, messages=[*turn.messages, *messages])


async def test_x(session: Session) -> None:
    turn = first_turn()
    message = await session.answered(
        turn,
        f'<think>\nHm.\n</think>\n\n<tool_call>\n{{"name": "ls", "arguments": {{"path":"src"}}}}\n</tool_call>{END}',
    )
    prompt = await session.prompt(following(turn, message, RESULT))
    assert (prompt.parent, session.rest(prompt)) == (0, RESULT_TEXT)
