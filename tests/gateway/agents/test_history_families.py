"""Which models' templates let a turn begin with the ids before it, and what is told of the others."""

from array import array
from dataclasses import replace
from typing import Any

import pytest

from gateway.agents.turn import Turn, chat_request
from tests.gateway.agents.test_history import Session, end_of
from tests.rigs.templated import chat_template

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


async def told(template: str, sampled: str, turn: Turn, answer: Json, *new: Json) -> str:
    """Return the text after the sampled ids, or the reason why the turn after the answer is a root."""
    session = Session(template, "<s>")
    before = await session.prompt(turn)
    token_ids = session.rendering.encoded(sampled)
    session.ids[0] = array("i", before.token_ids + token_ids)
    session.history.add(0, session.history.digest(turn, answer), end_of(before.token_ids, token_ids))
    following = replace(turn, messages=[*turn.messages, answer, *new])
    prompt, whole = await session.prompt(following), session.rendering.text(chat_request(following))
    if prompt.parent is None:
        assert session.rendering.decoded(prompt.token_ids) == whole
        return str(prompt.root_reason)
    rest = session.rest(prompt)
    assert whole.endswith(rest)
    return rest


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


REMINDER = SYSTEM | {"content": "Be brief."}
QUIET = "Say. /no_think"


@pytest.mark.parametrize(
    ("template", "before", "new", "rest"),
    [
        (TOOLS_LAST, [USER], [GO_ON], "template"),
        (SYSTEM_FIRST, [SYSTEM, USER], [REMINDER, GO_ON], "template"),
        (SYSTEM_FIRST, [SYSTEM, USER], [GO_ON], "<|user|>And more?<|assistant|>"),
        (FLAGGED, [USER], [GO_ON], "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n"),
        (
            FLAGGED,
            [USER],
            [GO_ON | {"content": QUIET}],
            f"\n<|im_start|>user\n{QUIET}<|im_end|>\n<|im_start|>assistant\n<think></think>",
        ),
        (FLAGGED, [USER | {"content": QUIET}], [GO_ON], "template"),
    ],
)
async def test_a_template_that_writes_older_messages_anew_begins_a_new_root(
    template: str, before: list[Json], new: list[Json], rest: str
) -> None:
    turn = Turn(model="m", messages=before, tools=[TOOL] if template == TOOLS_LAST else [])
    assert await told(template, f"Hm. Two files.{IM_END}", turn, SAID, *new) == rest


async def test_an_end_token_in_the_words_of_a_new_message_ends_no_answer() -> None:
    turn = Turn(model="m", messages=[USER])
    quoted = GO_ON | {"content": "<|endoftext|> ends it. Why?"}
    assert (
        await told(chat_template("qwen3"), "<think>Hm.</think>Two files.<|endoftext|>", turn, SAID, quoted)
        == "template"
    )
