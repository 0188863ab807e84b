"""Continues a conversation that was cut off: as token ids, then parsed by an engine as if it were made at once.

An engine renders the messages (`Rendering`), `TokenGeneration` makes the rest from the prompt's ids and the ids made so
far, and an engine parses text, reasoning and tool calls from all of them.

The rules of `resumption/features.py` hold for the body and for the rendered sampling parameters. A forced tool call is
structured output there, and restarts. So does a conversation with images, with a field that is not known here, or whose
prompt is rendered differently now than before.

A conversation that is read in chunks has token ids alone; an engine gives it its message (`worded`).
"""

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import structlog

from engines.chunks import num_unscored
from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError
from engines.raw_json import opened
from gateway.dialects.conversation import Conversation, is_medium
from gateway.dialects.rendering import Rendering
from gateway.dialects.resumption.features import MARK, inexact_fields
from gateway.dialects.runner import Runner
from gateway.dialects.sample import Reply, Sample
from gateway.dialects.spans import UNSCORED
from gateway.dialects.token_generation import TokenGeneration

log = structlog.get_logger()

T = TypeVar("T")

_OF_TOKENS = ("stop_reason", "token_ids", "weight_versions", "kv_versions", MARK)
_OF_STREAMS = ("prompt_token_ids", "delta")  # a reply has the prompt once, beside its choices
# Fields that end in the rendered prompt or in the message.
_OF_CONVERSATIONS = frozenset(
    {
        "messages", "tools", "tool_choice", "top_logprobs", "reasoning_effort", "include_reasoning",
        "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    }
)  # fmt: skip
# Fields that ask for nothing with this value.
_NEUTRAL: Json = {
    "parallel_tool_calls": True, "return_tokens_as_token_ids": False, "return_prompt_text": False,
}  # fmt: skip
_FREE_TOOLS = (None, "auto", "none")


class ChatContinuation:
    """Generates the rests of conversations and joins them to the parts before."""

    def __init__(self, rendering: Rendering, runner: Runner, tokens: TokenGeneration) -> None:
        self._rendering = rendering
        self._runner = runner
        self._tokens = tokens

    def inexact(self, body: Json) -> tuple[str, ...] | None:
        """The fields with which a conversation that continues is marked; None if it may not continue from its tokens,
        as far as its fields and the engines' routes go."""
        if body.get("tool_choice") not in _FREE_TOOLS or _has_media(body["messages"]):
            return None
        if not self._rendering.renders(body):
            return None
        return inexact_fields(
            {
                field: value
                for field, value in body.items()
                if field not in _OF_CONVERSATIONS and (field not in _NEUTRAL or value != _NEUTRAL[field])
            }
        )

    async def continued(self, conversation: Conversation, reply: Reply) -> Json | None:
        """The reply with the rests of its open samples. None where the conversation has to restart."""
        body = conversation.body
        answer: Json = opened(conversation.told(reply))
        cut = [answer["choices"][sample.index] for sample in reply.open]
        if body.get("logprobs") and not all(map(_has_all_logprobs, cut)):
            return None
        asked = await self._rendered(conversation, reply.prompt or [])
        if asked is None:
            return None
        prompt = self._tokens.prompt(conversation.rollout, asked)
        ids = Reply(asked["token_ids"], [Sample.of(choice | {"logprobs": _by_id(choice)}) for choice in cut])
        await self._runner.go_on(prompt, ids)
        whole = opened(prompt.told(ids)["choices"])
        parsed = await self._parsed(conversation, asked["token_ids"], cut, whole)
        if parsed is None:
            return None
        choices = [parsed.get(choice["index"], choice) for choice in answer["choices"]]
        for choice in choices:
            if unscored := num_unscored(choice.get("logprobs") or {}, len(choice["token_ids"])):
                choice[UNSCORED] = unscored
        made, usage = sum(len(choice["token_ids"]) for choice in choices), answer["usage"]
        usage |= {"completion_tokens": made, "total_tokens": usage["prompt_tokens"] + made}  # none is counted twice
        if usage.get("completion_tokens_details"):
            usage["completion_tokens_details"] = None  # of the first part alone
        return {**answer, "choices": choices}

    async def worded(self, conversation: Conversation, answer: Json) -> Json | None:
        """The reply with the messages that it lacks, parsed from its tokens. None where no replica parses them."""
        if all("message" in choice for choice in answer["choices"]):
            return answer
        answer = opened(answer)
        bare = [_bare(choice, conversation.body) for choice in answer["choices"] if "message" not in choice]
        parsed = await self._parsed(conversation, answer["prompt_token_ids"], bare, bare)
        if parsed is None:
            return None
        choices = [
            parsed[choice["index"]] | {"logprobs": choice["logprobs"]} if "message" not in choice else choice
            for choice in answer["choices"]
        ]
        return {**answer, "choices": choices}

    async def _rendered(self, conversation: Conversation, read: list[int]) -> Json | None:
        """The conversation as token ids if it may continue, else None; `read` are the ids that the engine read."""
        body = conversation.body
        rendered = await self._helped(conversation, self._rendering.render(body))
        if rendered is None or rendered.get("features") or rendered["token_ids"] != read:
            return None
        sampling = rendered["sampling_params"]
        passed = {key: body[key] for key in ("model", "cache_salt", "priority") if body.get(key) is not None}
        is_plain = inexact_fields(sampling) is not None
        return passed | {"token_ids": read, "sampling_params": sampling} if is_plain else None

    async def _parsed(
        self, conversation: Conversation, prompt: list[int], cut: Sequence[Json], whole: Sequence[Json]
    ) -> dict[int, Json] | None:
        """These choices as a conversation's, parsed from all of their tokens, by index."""
        body = conversation.body
        parsed = await self._helped(conversation, self._rendering.messages(body, prompt, whole))
        if parsed is None:
            return None
        told = zip(cut, whole, parsed, strict=True)
        return {first["index"]: _as_chat(first, choice, worded, body) for first, choice, worded in told}

    async def _helped(self, conversation: Conversation, asking: Awaitable[T]) -> T | None:
        """What an engine answers; None where none does."""
        try:
            return await asking
        except (EngineError, DeadlineExceeded) as error:
            request = conversation.rollout.request_id
            log.warning("no replica helps to continue a conversation", request=request, error=str(error))
            return None


def _has_all_logprobs(choice: Json) -> bool:
    """False where the engine has left out log-probs of tokens: those that it gave cannot be told apart by token."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    return len(entries) == len(choice["token_ids"])


def _by_id(choice: Json) -> Json | None:
    """The log-probs of a conversation's choice in the form of token ids. Its candidates have names alone."""
    if not choice.get("logprobs"):
        return None
    entries = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    return {"content": [{"token_id": token_id, "logprob": entry["logprob"]} for token_id, entry in entries]}


def _bare(choice: Json, body: Json) -> Json:
    """A choice that was read as a stream, as its token ids alone have it.

    vLLM reports a stream's end as `tool_calls` after any call; without the limit reached, a stop token ended it.
    """
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    ended = "length" if len(choice["token_ids"]) == limit else "stop"
    reason = ended if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
    return choice | {"logprobs": None, "finish_reason": reason}


def _has_media(messages: list[Any]) -> bool:
    """True for messages with images, sound or video, which token ids alone do not continue."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(map(is_medium, parts))


def _as_chat(first: Json, whole: Json, parsed: Json, body: Json) -> Json:
    """One choice of a conversation: all its tokens, as `parsed` by an engine; `first` is its part before a cut."""
    message = parsed["message"]
    calls = message.get("tool_calls") and body.get("tool_choice") in (None, "auto")
    return {key: value for key, value in first.items() if key not in _OF_STREAMS} | {
        "message": message,
        "logprobs": whole["logprobs"] and _as_chats_logprobs(first, parsed, body.get("top_logprobs") or 0),
        "finish_reason": "tool_calls" if calls else whole["finish_reason"],
        **{key: whole[key] for key in _OF_TOKENS if key in whole},
    }


def _as_chats_logprobs(first: Json, parsed: Json, top: int) -> Json:
    before = first["logprobs"]["content"] if first["logprobs"] else []
    after = parsed["logprobs"]["content"][len(before) :]
    if top >= 0:
        after = [entry | {"top_logprobs": entry["top_logprobs"][:top]} for entry in after]
    return {"content": before + after}
