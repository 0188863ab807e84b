"""Whatever an agent does, a turn begins with all ids of the call that it follows, or is a root with a reason."""

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.agents.history import CHANGED, FIRST, TEMPLATE, TOOLS
from gateway.agents.turn import Turn, chat_request
from tests.gateway.agents.test_history import CALL, END, OPENING, RESULT, SYSTEM, THOUGHT, Session, first_turn, user

Json = dict[str, Any]

answers = st.sampled_from(
    [
        (f"{THOUGHT}{CALL}{END}", "stop", None),
        (f"{THOUGHT}I look.\n\n{CALL}\n{CALL}{END}", "stop", None),
        (f"Done.{END}", "stop", None),
        (f"{THOUGHT}Done.\n{END}", "stop", None),
        (f"<tool_call>\n{{broken\n</tool_call>{END}", "stop", None),
        ("Done.<|endoftext|>", "stop", None),
        (f"{END}", "stop", None),
        ("<think>\nHm", "length", None),
        (CALL, "length", None),
        ("One, two, STOP", "stop", "STOP"),
    ]
)
words = st.text(st.sampled_from('ab\n {}"üß<|>'), max_size=12).map(lambda text: f"{text}<|endoftext|>") | st.text(
    max_size=20
)
news = st.lists(st.sampled_from(["result", "user", "system", "assistant"]), min_size=1, max_size=3)
steps = st.tuples(
    answers,
    news,
    words,
    st.sampled_from(["sends all", "drops reasoning", "changes the answer", "drops the answer", "other tools"]),
    st.integers(0, 9),  # whose turn it goes on with
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=1, max_size=8))
def test_a_turn_begins_with_its_parents_ids_or_is_a_root_with_a_reason(script: list[Any]) -> None:
    asyncio.run(_played(script))


async def _played(script: list[Any]) -> None:
    session, turns = Session(), [first_turn()]
    for answer, roles, text, client, place in script:
        turn = turns[max(0, len(turns) - 1 - place // 4)]
        message = await session.answered(turn, *answer)
        following = _sent(turn, message, roles, text, client)
        prompt = await session.prompt(following)  # which compares the ids with the parent's
        told = session.rendering.decoded(prompt.token_ids)
        assert told.endswith(OPENING)
        if prompt.parent is None:
            assert prompt.root_reason in (FIRST, CHANGED, TOOLS, TEMPLATE)
            assert told == session.rendering.text(chat_request(following))
        else:
            theirs = session.rendering.text(chat_request(following))
            rest = session.rest(prompt)
            assert theirs.endswith(rest.removeprefix(END)) or f"{END}{rest}" in theirs
            assert not (
                session.ids[prompt.parent][-1:].tolist() == session.rendering.encoded(END) and rest.startswith(END)
            )
        turns.append(following)


def _sent(turn: Turn, message: Json, roles: list[str], text: str, client: str) -> Turn:
    """Return the turn that a client sends after an answer."""
    if client == "drops reasoning":
        message = {name: value for name, value in message.items() if name != "reasoning"}
    if client == "changes the answer":
        message = message | {"content": f"{text}?"}
    told = [message] * (client != "drops the answer")
    results = [RESULT | {"tool_call_id": call["id"], "content": text} for call in message.get("tool_calls") or ()]
    others: dict[str, list[Json]] = {
        "result": results,
        "user": [user(text)],
        "system": [SYSTEM | {"content": text}],
        "assistant": [{"role": "assistant", "content": text}],
    }
    new = [message for role in roles for message in others[role]]
    tools = turn.tools[:1] if client == "other tools" else turn.tools
    return replace(turn, messages=[*turn.messages, *told, *(new or [user(text)])], tools=tools)
