"""Which models' templates let a turn begin with the ids before it, and what is told of the others."""

from array import array
from typing import Any

import pytest

from gateway.agents.history import History, Prompt
from gateway.agents.tails import Tails
from gateway.agents.turn import Turn, chat_request
from tests.gateway.agents.test_history import end_of
from tests.rigs.templated import Templated, chat_template, tokenizer

Json = dict[str, Any]
SYSTEM: Json = {"role": "system", "content": "You are a coder."}
USER: Json = {"role": "user", "content": "What is here?"}
GO_ON: Json = {"role": "user", "content": "And more?"}
CALL: Json = {"id": "call00001", "type": "function", "function": {"name": "ls", "arguments": '{"path": "src"}'}}
RESULT: Json = {"role": "tool", "tool_call_id": "call00001", "name": "ls", "content": "a.py"}
SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string", "description": "A folder."}}}
TOOL: Json = {"type": "function", "function": {"name": "ls", "description": "Lists.", "parameters": SCHEMA}}
CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID: Json = {"role": "assistant", "content": "Two files."}
IM_END = "<|im_end|>"

# A template that moves the tools to the last user's message, as Mistral's older ones do.
TOOLS_LAST = """
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
{%- if message is sameas users[-1] and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- if message.role == "assistant" %}{{ message.content }}<|im_end|>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""
# One that puts all system messages first, as DeepSeek's do.
SYSTEM_FIRST = """
{%- for message in messages if message.role == "system" %}{{ message.content }}
{% endfor %}
{%- for message in messages if message.role != "system" %}
{%- if message.role == "assistant" %}<|assistant|>{{ message.content }}<|im_end|>
{%- else %}<|user|>{{ message.content }}{% endif %}
{%- endfor %}<|assistant|>"""
# One whose opening of an answer depends on what any message before has said, as Nemotron's and SmolLM's do.
FLAGGED = """
{%- set flags = namespace(thinks=true) %}
{%- for message in messages %}
{%- if "/no_think" in message.content %}{% set flags.thinks = false %}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if not flags.thinks %}<think></think>{% endif %}"""


class Told:
    """The prompt of a turn after an answer, and what the template would have made of it."""

    def __init__(self, rendering: Templated, before: Prompt, sampled: str) -> None:
        self.rendering = rendering
        self.token_ids = rendering.encoded(sampled)
        self.whole = array("i", before.token_ids + self.token_ids)
        self.history = History(lambda call: self.whole)
        self.end = end_of(before.token_ids, self.token_ids)

    async def after(self, turn: Turn, answer: Json, *new: Json) -> str:
        """Return the text after the sampled ids, or the reason why the turn is a root."""
        self.history.add(0, self.history.digest(turn, answer), self.end)
        following = Turn(model="m", messages=[*turn.messages, answer, *new], tools=turn.tools)
        prompt = await self.history.prompt(following, Tails(self.rendering))
        assert prompt is not None
        if prompt.parent is None:
            assert self.rendering.decoded(prompt.token_ids) == self.rendering.text(chat_request(following))
            return str(prompt.root_reason)
        assert prompt.token_ids[: len(self.whole)] == self.whole.tolist()
        rest = self.rendering.decoded(prompt.token_ids[len(self.whole) :])
        assert self.rendering.text(chat_request(following)).endswith(rest)
        return rest


async def told(template: str, sampled: str, turn: Turn, answer: Json, *new: Json) -> str:
    rendering = Templated.of(template, tokenizer(template, "<s>"))
    before = await History(lambda call: array("i")).prompt(turn, Tails(rendering))
    assert before is not None
    return await Told(rendering, before, sampled).after(turn, answer, *new)


@pytest.mark.parametrize(
    ("family", "sampled", "rest"),
    [
        (
            "qwen2_5",
            '<tool_call>\n{"name":"ls","arguments":{"path":"src"}}\n</tool_call><|im_end|>',
            "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3_5_think",
            "Hm.\n</think>\n\n<tool_call>\n<function=ls>\n<parameter=path>src</parameter></function></tool_call><|im_end|>",
            "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "glm4moe",
            "\n<think>Hm.</think><tool_call>ls\n<arg_key>path</arg_key><arg_value>src</arg_value></tool_call><|observation|>",
            "\n<tool_response>\na.py\n</tool_response><|assistant|>",
        ),
        (
            "gptoss",
            '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ls '
            '<|constrain|>json<|message|>{"path":"src"}<|call|>',
            '<|start|>functions.ls to=assistant<|channel|>commentary<|message|>"a.py"<|end|><|start|>assistant',
        ),
        (
            "llama3_1",
            '{"name":"ls","parameters":{"path":"src"}}<|eot_id|>',
            '<|start_header_id|>ipython<|end_header_id|>\n\n"a.py"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma4_v5",
            '<|tool_call>call:ls{path:<|"|>src<|"|>}<tool_call|><|tool_response>',
            'response:ls{value:<|"|>a.py<|"|>}<tool_response|>',
        ),
        (
            "nemotron_3_nano",
            "Hm.</think><tool_call>\n<function=ls>\n<parameter=path>\nsrc</parameter></function></tool_call><|im_end|>",
            "\n<|im_start|>user\n<tool_response>\na.py\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
    ],
)  # fmt: skip
async def test_the_result_of_a_tool_follows_a_call_in_any_words(family: str, sampled: str, rest: str) -> None:
    turn = Turn(model="m", messages=[SYSTEM, USER], tools=[TOOL])
    assert await told(chat_template(family), sampled, turn, CALLED, RESULT) == rest


@pytest.mark.parametrize(
    ("family", "end", "rest"),
    [
        ("qwen2_5", IM_END, "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", IM_END, "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3_6", IM_END, "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("qwen3_8", IM_END, "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("glm4moe", "<|user|>", "\nAnd more?<|assistant|>"),
        ("deepseekv3", "<｜end▁of▁sentence｜>", "<｜User｜>And more?<｜Assistant｜><think>\n"),
        (
            "llama3",
            "<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nAnd more?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("gptoss", "<|return|>", "template"),  # it writes another end token, and no reasoning of earlier turns
    ],
)
async def test_a_user_follows_an_answer(family: str, end: str, rest: str) -> None:
    turn = Turn(model="m", messages=[SYSTEM, USER])
    assert await told(chat_template(family), f"<think>Hm.</think>Two files.{end}", turn, SAID, GO_ON) == rest


async def test_a_template_that_moves_the_tools_begins_a_new_root() -> None:
    turn = Turn(model="m", messages=[USER], tools=[TOOL])
    assert await told(TOOLS_LAST, f"Hm. Two files.{IM_END}", turn, SAID, GO_ON) == "template"


async def test_a_template_that_puts_system_messages_first_begins_a_new_root() -> None:
    turn, reminder = Turn(model="m", messages=[SYSTEM, USER]), SYSTEM | {"content": "Be brief."}
    sampled = f"Hm. Two files.{IM_END}"
    assert await told(SYSTEM_FIRST, sampled, turn, SAID, reminder, GO_ON) == "template"
    assert await told(SYSTEM_FIRST, sampled, turn, SAID, GO_ON) == "<|user|>And more?<|assistant|>"


@pytest.mark.parametrize(
    ("before", "new", "rest"),
    [
        (USER, GO_ON, "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n"),
        (
            USER,
            GO_ON | {"content": "Say. /no_think"},
            "\n<|im_start|>user\nSay. /no_think<|im_end|>\n<|im_start|>assistant\n<think></think>",
        ),
        (USER | {"content": "Say. /no_think"}, GO_ON, "template"),
    ],
    ids=["none", "in the new message", "in an old message"],
)
async def test_an_opening_that_older_messages_decide_begins_a_new_root(before: Json, new: Json, rest: str) -> None:
    turn = Turn(model="m", messages=[before])
    assert await told(FLAGGED, f"Hm. Two files.{IM_END}", turn, SAID, new) == rest


async def test_an_end_token_in_the_words_of_a_new_message_ends_no_answer() -> None:
    turn = Turn(model="m", messages=[USER])
    quoted = GO_ON | {"content": "<|endoftext|> ends it. Why?"}
    assert (
        await told(chat_template("qwen3"), "<think>Hm.</think>Two files.<|endoftext|>", turn, SAID, quoted)
        == "template"
    )
