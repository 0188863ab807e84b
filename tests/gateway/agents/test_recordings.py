"""Requests that agents sent, each unchanged but for its base URL and key: Claude Code 2.1.328 and Codex 0.169.0 (turns
with tools, a subagent, a compaction), OpenAI Agents SDK 0.24.0 (Responses, then chat), mini-swe-agent 2.4.6 and Qwen
Code 0.15.10 (turns with tools, a subagent, an answer that was cut off, a compaction, notes for its memory).

Long texts are shortened, and ids and paths are replaced.
"""

import json

import pytest

from tests.rigs.recordings import AGENTS, turns_of


@pytest.mark.parametrize("name", AGENTS)
def test_each_request_is_a_turn(name: str) -> None:
    for turn in turns_of(name):
        assert turn.model == "policy"
        assert {message["role"] for message in turn.messages} >= {"user"}
        assert all(message["content"] or message.get("tool_calls") for message in turn.messages)


@pytest.mark.parametrize("name", AGENTS)
def test_each_result_follows_its_call(name: str) -> None:
    for turn in turns_of(name):
        calls: set[str] = set()
        for message in turn.messages:
            calls |= {call["id"] for call in message.get("tool_calls", ())}
            assert message.get("tool_call_id", None) in (None, *calls)


def test_codexs_tools_of_a_namespace_are_shown() -> None:
    names = [tool["function"]["name"] for tool in turns_of("codex")[0].tools]
    assert "multi_agent_v1__spawn_agent" in names
    assert "exec_command" in names


def test_claude_codes_deferred_tool_says_so() -> None:
    deferred = [
        tool["function"]["name"] for tool in turns_of("claude_code")[0].tools if tool["function"].get("defer_loading")
    ]
    assert deferred == ["DeferredToolPlaceholder"]


@pytest.mark.parametrize(
    ("name", "turn", "reasoning"),
    [
        ("claude_code", 1, "A file first."),
        ("codex", 1, "A file first."),
        ("openai_agents", 1, "Weather."),
        ("openai_agents", 4, None),  # its chat drops what it was told
        ("mini_swe_agent", 1, "Files."),
        ("qwen_code", 1, "A folder first."),
    ],
)
def test_what_an_agent_sends_back_is_the_message_that_was_answered(name: str, turn: int, reasoning: str | None) -> None:
    *_, answered = [message for message in turns_of(name)[turn].messages if message["role"] == "assistant"]
    assert answered.get("reasoning") == reasoning
    assert answered.keys() - {"reasoning"} == {"role", "content", "tool_calls"}
    assert all(json.loads(call["function"]["arguments"]) for call in answered["tool_calls"])
