"""What vLLM itself makes of the bodies that agents send, beside the turns that are made of them here."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from gateway.agents.turn import Turn
from tests.rigs.recordings import AGENTS, recorded, turns_of

pytestmark = pytest.mark.vllm


def chat_of(turn: Turn) -> dict[str, Any]:
    given = {"tools": turn.tools, "tool_choice": turn.tool_choice, "max_tokens": turn.max_tokens}
    given = {name: value for name, value in given.items() if value}
    return {"model": turn.model, "messages": turn.messages, **turn.template, **turn.sampling, **given}


def compared(message: Any) -> Any:
    """A message without the forms that mean the same to vLLM: content that is null, and the spelling of arguments."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {name: value for name, value in message.items() if value is not None} | (
        {"tool_calls": calls} if calls else {}
    )


@pytest.mark.parametrize("agent", AGENTS)
def test_vllm_takes_each_turn_as_a_chat_and_knows_all_its_fields(agent: str) -> None:
    for turn in turns_of(agent):
        assert not ChatCompletionRequest(**chat_of(turn)).model_extra


def test_claude_codes_messages_are_those_that_vllm_makes_of_them() -> None:
    for call, ours in zip(recorded("claude_code"), turns_of("claude_code"), strict=True):
        asked = AnthropicMessagesRequest(**call["body"])
        theirs = AnthropicServingMessages.to_chat_completion_request(asked).model_dump(exclude_unset=True, mode="json")
        assert [compared(message) for message in ours.messages] == [compared(one) for one in theirs["messages"]]
        assert ours.tool_choice == theirs["tool_choice"]
        assert ours.template == {"reasoning_effort": theirs["reasoning_effort"]}
        assert [tool["function"]["name"] for tool in ours.tools] == [
            tool["function"]["name"] for tool in theirs["tools"]
        ]
