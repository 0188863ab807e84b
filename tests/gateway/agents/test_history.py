"""A turn begins with the ids of the call before it, under the real template of Qwen3, or says why it does not."""

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import EngineRefused
from gateway.agents.history import End, History, Prompt
from gateway.agents.tails import Tails
from gateway.agents.turn import Turn, chat_request
from tests.rigs.templated import ROOM, Templated, chat_template, tokenizer

Json = dict[str, Any]
END = "<|im_end|>"
QWEN3 = chat_template("qwen3")
OPENING = "<|im_start|>assistant\n"
USER: Json = {"role": "user", "content": "What is here?"}
SYSTEM: Json = {"role": "system", "content": "You are a coder."}


def tool(name: str) -> Json:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "Reads.", "parameters": schema}}


TOOLS = [tool("ls"), tool("cat")]
Next = Callable[[Turn, Json], Turn]
"""Returns an agent's turn after an answer to its first."""
THOUGHT = "<think>\nHm.\n</think>\n\n"
RESULT: Json = {"role": "tool", "tool_call_id": "call_0", "content": "a.py"}
RESULT_TEXT = f"\n<|im_start|>user\n<tool_response>\na.py\n</tool_response>{END}\n{OPENING}"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def user_text(text: str) -> str:
    return f"\n<|im_start|>user\n{text}{END}\n{OPENING}"


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "ls", "arguments": {arguments}}}\n</tool_call>'


CALL = call('{"path": "src"}')
GO_ON, GO_ON_TEXT = user("Go on."), user_text("Go on.")
REMINDER_TEXT = f"\n<|im_start|>system\nBe brief.{END}"


def end_of(prompt: list[int], token_ids: list[int], finish: str = "stop", stop: str | int | None = None) -> End:
    return End(finish, stop, len(prompt), len(prompt + token_ids), (prompt + token_ids)[-8:])


class Session:
    """A session of an agent on a model whose answers a test scripts."""

    def __init__(self, template: str = QWEN3, *bos: str) -> None:
        self.rendering = Templated.of(template, tokenizer(template, *bos))
        self.tails = Tails(self.rendering)
        self.ids: dict[int, array[int]] = {}
        self.history = History(lambda call: self.ids[call])

    async def prompt(self, turn: Turn) -> Prompt:
        prompt = await self.history.prompt(turn, self.tails)
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
        shown = token_ids[:-1] if (finish, stop) == ("stop", None) else token_ids
        message = parsed(self.rendering.decoded(shown).removesuffix(str(stop)))
        end = end_of(prompt.token_ids, token_ids, finish, stop)
        self.history.add(call, self.history.digest(turn, message), end)
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
        message["reasoning"], text = reasoning.removeprefix("<think>").strip("\n"), text.lstrip("\n")
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
    return Turn(**{"model": "m", "messages": [SYSTEM, USER], "tools": TOOLS} | more)


def following(turn: Turn, *messages: Json) -> Turn:
    return replace(turn, messages=[*turn.messages, *messages])


# What an agent sends after an answer.


def returns(turn: Turn, message: Json) -> Turn:
    return following(turn, message, RESULT)


def drops_reasoning(turn: Turn, message: Json) -> Turn:
    return returns(turn, {name: message[name] for name in ("role", "content", "tool_calls")})


def writes_arguments(**how: Any) -> Next:
    def written(turn: Turn, message: Json) -> Turn:
        [call] = message["tool_calls"]
        arguments = json.dumps(json.loads(call["function"]["arguments"]), **how)
        calls = [{"id": "call_0", "type": "function", "function": call["function"] | {"arguments": arguments}}]
        return returns(turn, message | {"tool_calls": calls})

    return written


def goes_on(turn: Turn, message: Json) -> Turn:
    return following(turn, message, GO_ON)


def trims_text(turn: Turn, message: Json) -> Turn:
    return goes_on(turn, {"role": "assistant", "content": message["content"].strip()})


def reminds(turn: Turn, message: Json) -> Turn:
    return following(turn, message, {"role": "system", "content": "Be brief."}, GO_ON)


def moves_the_cache_mark(turn: Turn, message: Json) -> Turn:
    marked = {"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}
    return following(replace(turn, messages=[SYSTEM | {"content": [marked]}, USER]), message, RESULT)


def has_other_tools(turn: Turn, message: Json) -> Turn:
    return returns(replace(turn, tools=TOOLS[:1]), message)


def retries(turn: Turn, message: Json) -> Turn:
    return turn


def starts_a_subagent(turn: Turn, message: Json) -> Turn:
    return replace(turn, messages=[SYSTEM | {"content": "You are a searcher."}, user("Find it.")])


def compacts(turn: Turn, message: Json) -> Turn:
    return following(turn, message, RESULT, GO_ON)


def compacts_without_tools(turn: Turn, message: Json) -> Turn:
    return replace(compacts(turn, message), tools=[])


def starts_from_a_summary(turn: Turn, message: Json) -> Turn:
    return replace(turn, messages=[SYSTEM, USER, user("Summary: nothing yet.")])


def changes_the_answer(turn: Turn, message: Json) -> Turn:
    return goes_on(turn, message | {"content": "Something else."})


def case(name: str, sampled: str, sends: Next, told: str, finish: str = "stop", stop: str | None = None) -> Any:
    """`told` is the text after the sampled ids, or the reason why there is no parent."""
    return pytest.param(sampled, sends, told, finish, stop, id=name)


@pytest.mark.parametrize(
    ("sampled", "sends", "told", "finish", "stop"),
    [
        case("canonical call", THOUGHT + CALL + END, returns, RESULT_TEXT),
        case("canonical call, arguments in other JSON", THOUGHT + CALL + END, writes_arguments(indent=1), RESULT_TEXT),
        case("reasoning is dropped", THOUGHT + CALL + END, drops_reasoning, RESULT_TEXT),
        case("text before the call", f"{THOUGHT}I look.\n{CALL}{END}", returns, RESULT_TEXT),
        case("text and two newlines before the call", f"{THOUGHT}I look.\n\n{CALL}{END}", returns, RESULT_TEXT),
        case("compact JSON", THOUGHT + call('{"path":"src","depth":2}') + END, returns, RESULT_TEXT),
        case(
            "other order of keys",
            THOUGHT + call('{"path": "src", "depth": 2}') + END,
            writes_arguments(sort_keys=True),
            RESULT_TEXT,
        ),
        case("escapes", THOUGHT + call('{"path": "\\u00fc"}') + END, returns, RESULT_TEXT),
        case("one newline after reasoning", f"<think>\nHm.\n</think>\n{CALL}{END}", returns, RESULT_TEXT),
        case(
            "characters come back as escapes",
            THOUGHT + call('{"path": "Übersicht"}') + END,
            writes_arguments(ensure_ascii=True),
            RESULT_TEXT,
        ),
        case("call that does not parse", THOUGHT + call('{"path": "src"') + END, goes_on, GO_ON_TEXT),
        case("cut by the limit", THOUGHT + '<tool_call>\n{"name": "l', goes_on, END + GO_ON_TEXT, "length"),
        case("cut by the limit in its reasoning", "<think>\nH", goes_on, END + GO_ON_TEXT, "length"),
        case("stop string", "Two files.\nSTOP", goes_on, END + GO_ON_TEXT, "stop", "STOP"),
        case("reasoning, then a user", f"{THOUGHT}Two files.{END}", goes_on, GO_ON_TEXT),
        case("text that is trimmed", f"{THOUGHT}\n Two files. \n{END}", trims_text, GO_ON_TEXT),
        case("system message in line", f"Two files.{END}", reminds, REMINDER_TEXT + GO_ON_TEXT),
        case("cache mark moves", THOUGHT + CALL + END, moves_the_cache_mark, RESULT_TEXT),
        case("list of tools changes", THOUGHT + CALL + END, has_other_tools, "tools"),
        case("retry", THOUGHT + CALL + END, retries, "first"),
        case("subagent", THOUGHT + CALL + END, starts_a_subagent, "first"),
        case("compaction", THOUGHT + CALL + END, compacts, RESULT_TEXT.removesuffix(OPENING) + GO_ON_TEXT[1:]),
        case("compaction without tools", THOUGHT + CALL + END, compacts_without_tools, "tools"),
        case("conversation after a compaction", THOUGHT + CALL + END, starts_from_a_summary, "first"),
        case("answer that the client changed", f"Two files.{END}", changes_the_answer, "changed"),
        case("another end token than the template's", "Two files.<|endoftext|>", goes_on, "template"),
    ],
)  # fmt: skip
async def test_a_turn_begins_with_the_ids_before_it_or_is_a_root_with_a_reason(
    session: Session, sampled: str, sends: Next, told: str, finish: str, stop: str | None
) -> None:
    turn = first_turn()
    message = await session.answered(turn, sampled, finish, stop)
    prompt = await session.prompt(sends(turn, message))
    assert (prompt.root_reason or session.rest(prompt)) == told


async def test_a_text_that_was_sampled_in_other_merges_keeps_them(session: Session) -> None:
    letters = [token for letter in "Two files of b.py." for token in session.rendering.encoded(letter)]
    assert letters != session.rendering.encoded("Two files of b.py.")
    message = await session.answered(first_turn(), letters + session.rendering.encoded(END))
    prompt = await session.prompt(goes_on(first_turn(), message))
    assert (prompt.parent, session.rest(prompt)) == (0, GO_ON_TEXT)


async def test_a_long_session_is_one_path_and_its_new_messages_alone_are_rendered(session: Session) -> None:
    turn = first_turn()
    for number in range(12):
        message = await session.answered(turn, THOUGHT + CALL + END)
        turn = following(turn, message, RESULT | {"content": f"result {number}"})
    before = len(session.rendering.asked)
    prompt = await session.prompt(turn)
    [asked] = session.rendering.asked[before:]
    assert (prompt.parent, len(asked["messages"])) == (11, 4)
    text = session.rendering.decoded(prompt.token_ids)
    assert text.count(CALL + END) == text.count("Hm.") == 12
    assert [f"result {number}\n</tool_response>{END}\n{OPENING}" in text for number in range(12)] == [True] * 12
    theirs = session.rendering.text(chat_request(turn))
    assert text.replace(THOUGHT, "") == theirs.replace(THOUGHT, "")


async def test_a_retry_is_a_sibling_and_the_latest_answer_is_followed(session: Session) -> None:
    turn = first_turn()
    message = await session.answered(turn, f"Two files.{END}")
    one = await session.prompt(goes_on(turn, message))
    await session.answered(goes_on(turn, message), f"Yes.{END}")
    assert await session.prompt(goes_on(turn, message)) == one
    again = await session.answered(turn, f"{THOUGHT}Two files.{END}")
    assert (await session.prompt(goes_on(turn, again))).parent == 2


async def test_a_whole_rendering_follows_the_longest_call_whose_ids_it_begins_with(session: Session) -> None:
    turn = first_turn(tools=[])
    one = await session.answered(turn, f"One.{END}")
    await session.answered(goes_on(turn, one), f"Two.{END}")
    replaced = following(turn, one, GO_ON, {"role": "assistant", "content": "Three."}, GO_ON)
    prompt = await session.prompt(replaced)
    assert prompt.parent == 0
    assert session.rest(prompt) == GO_ON_TEXT + f"Three.{END}" + GO_ON_TEXT


async def test_a_turn_with_an_image_is_rendered_whole(session: Session) -> None:
    seen = user("") | {
        "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "?"}]
    }
    message = await session.answered(first_turn(), f"{THOUGHT}Two.{END}")
    prompt = await session.prompt(following(first_turn(), message, seen))
    assert (prompt.parent, prompt.root_reason) == (None, "media")


async def test_a_limit_that_the_client_leaves_out_is_what_the_context_leaves(session: Session) -> None:
    turn = first_turn()
    message = await session.answered(turn, f"{THOUGHT}{'word ' * 4_000}{END}")
    root, next_prompt = await session.prompt(turn), await session.prompt(goes_on(turn, message))
    assert root.sampling["max_tokens"] == 32_768
    assert next_prompt.sampling["max_tokens"] == ROOM - len(next_prompt.token_ids) < 32_768
    asked = await session.prompt(goes_on(replace(turn, max_tokens=50), message))
    assert asked.sampling["max_tokens"] == 50


async def test_a_limit_of_the_client_holds_where_the_stub_is_longer_than_the_prompt(session: Session) -> None:
    class Small(Templated):
        def room(self, name: str | None) -> int | None:
            return 400

        async def render(self, chat: Json) -> Json | None:
            rendered = await super().render(chat)
            assert rendered is not None
            left = 400 - len(rendered["token_ids"])
            return rendered | {"sampling_params": {"max_tokens": min(left, chat["max_tokens"])}}

    session.tails = Tails(Small.of(session.rendering.template, session.rendering.tokens))
    turn = first_turn(max_tokens=50, tools=[])
    message = await session.answered(turn, f"Yes.{END}")
    long = following(turn, message, user("a1" * 100))
    prompt = await session.prompt(long)
    assert prompt.parent == 0
    assert prompt.sampling["max_tokens"] == min(50, 400 - len(prompt.token_ids))


async def test_a_prompt_over_the_context_is_refused_by_the_engine(session: Session) -> None:
    turn = first_turn()
    message = await session.answered(turn, f"{'a1' * 10_000}{END}")
    with pytest.raises(EngineRefused):
        await session.prompt(following(turn, message, user("a1" * 15_000)))


async def test_a_model_that_no_engine_renders_has_no_prompt(session: Session) -> None:
    message = await session.answered(first_turn(), f"Two.{END}")

    class Silent(Templated):
        async def render(self, chat: Json) -> Json | None:
            return None

    silent = Silent.of(session.rendering.template, session.rendering.tokens)
    for turn in (first_turn(), goes_on(first_turn(), message)):
        assert await session.history.prompt(turn, Tails(silent)) is None
