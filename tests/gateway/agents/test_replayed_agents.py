"""Recorded runs of agents, request by request through a gateway: each becomes the tree of its session."""

from typing import Any

import pytest

from gateway.dialects.rendering import Rendering
from tests.rigs import rig as rigs
from tests.rigs.recordings import recorded, turns_of
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.sessions import record, whole

SPOKEN: Json = {"role": "assistant", "content": "Done.", "tool_calls": []}


async def replayed(start_rig: StartRig, agent: str, monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """The calls of a session that has an agent's run, in which each answer is parsed as the agent was told then."""
    turns = turns_of(agent)

    async def message(_: Rendering, chat: Json, prompt: list[int], choice: Json) -> Json:
        size = len(chat["messages"])
        later = [turn.messages for turn in turns if turn.messages[:size] == chat["messages"]]
        answers = [
            messages[size] for messages in later if len(messages) > size and messages[size]["role"] == "assistant"
        ]
        return answers[0] if answers else SPOKEN

    monkeypatch.setattr(rigs, "MAX_MODEL_LEN", 1 << 16)
    monkeypatch.setattr(Rendering, "message", message)
    rig = await start_rig(1)
    for call in recorded(agent):
        headers = {name: value for name, value in call["headers"].items() if "-" in name and name != "user-agent"}
        await asked(rig, f"/sessions/run{call['path']}", call["body"] | {"model": "sim"}, headers)
    _, calls = await record(rig, "run")
    for call in calls:
        assert call["mask"] is None
        if call["parent"] is not None:
            before = whole(calls, call["parent"])
            assert whole(calls, call["call"])[: len(before)] == before
    return calls


async def asked(rig: Rig, path: str, body: Json, headers: Json) -> None:
    async with rig.client.post(rig.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


def tree(calls: list[Json]) -> list[Any]:
    """The parent of each call, or why it is a root."""
    return [call["root_reason"] if call["parent"] is None else call["parent"] for call in calls]


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        # A subagent, a compaction and the conversation after it, which begins with a summary.
        ("claude_code", ["first", 0, "first", 2, 1, 1, "changed"]),
        # A subagent, a compaction without tools, and the conversation after it.
        ("codex", ["first", 0, 1, "first", "tools", "first", 5]),
        # Twice, in two dialects: a tool, then another agent that is handed the conversation.
        ("openai_agents", ["first", 0, "changed", "first", 3, "changed"]),
        ("mini_swe_agent", ["first", 0]),
        # Conversations begin with an answer of its own: a subagent; a process that goes on, whose first message lists a
        # new file, and which asks for an answer again; a compaction, the conversation after it, notes for its memory.
        ("qwen_code", ["first", 0, 1, "changed", 3, 2, "changed", 6, 6, "changed", "changed", "changed"]),
    ],
)
async def test_a_run_is_one_tree_with_roots_for_subagents_and_compactions(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, agent: str, expected: list[Any]
) -> None:
    assert tree(await replayed(start_rig, agent, monkeypatch)) == expected


async def test_subagents_and_windows_are_named(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    claude_code = await replayed(start_rig, "claude_code", monkeypatch)
    assert [call["agent"] is not None for call in claude_code] == [False, False, True, True, False, False, False]
    codex = await replayed(start_rig, "codex", monkeypatch)
    assert [call["agent"] is not None for call in codex] == [False, False, False, True, False, False, False]
    assert [call["window"].rpartition(":")[2] for call in codex] == ["0"] * 5 + ["1"] * 2
