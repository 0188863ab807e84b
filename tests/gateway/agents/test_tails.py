"""What a template makes of new messages is learned once for all sessions with the same settings."""

from typing import Any

from gateway.agents.tails import Tails
from gateway.agents.turn import Turn
from tests.gateway.agents.test_history import SYSTEM, TOOLS, USER
from tests.rigs.templated import Templated, chat_template, tokenizer

Json = dict[str, Any]
SAID: Json = {"role": "assistant", "content": "Two files."}
CALL: Json = {"id": "call_7", "type": "function", "function": {"name": "ls", "arguments": '{"path": "src"}'}}
RESULT: Json = {"role": "tool", "tool_call_id": "call_7", "content": "a.py"}
AFTER_TEXT = Turn(model="m", messages=[SYSTEM, USER, SAID, USER], tools=TOOLS)
AFTER_CALL = Turn(model="m", messages=[SYSTEM, USER, SAID | {"tool_calls": [CALL]}, RESULT], tools=TOOLS)


async def test_a_template_that_refuses_a_stub_has_no_tail() -> None:
    refusing = Templated.of("{{ raise_exception('no') }}", tokenizer(chat_template("qwen3")))
    assert await Tails(refusing).after(3, AFTER_TEXT, b"s") is None


async def test_a_template_that_leaves_out_calls_has_no_tail_after_them() -> None:
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
    silent = Tails(Templated.of(template, tokenizer(template)))
    assert await silent.after(3, AFTER_CALL, b"s") is None
    assert await silent.after(3, AFTER_TEXT, b"s") is not None
