"""/v1/chat/completions of vLLM's dialect: one conversation is one rollout."""

from dataclasses import replace
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.dialects.conversation import Conversation, is_medium
from gateway.dialects.rendering import Rendering
from gateway.dialects.resumption.chat import ChatContinuation
from gateway.dialects.runner import DEFAULT_MAX_TOKENS, Runner, using
from gateway.dialects.sample import Reply
from gateway.dialects.sampling import Terms, check_sampling
from gateway.dialects.spans import UNSCORED
from gateway.dialects.token_generation import TokenGeneration
from gateway.fleet.fleet import Fleet

_CHARACTERS_PER_TOKEN = 4
# Load of an image or a sound, whose tokens do not depend on its bytes.
_CHARACTERS_PER_MEDIUM = 4096


class Chat:
    """Decodes a conversation and has replicas continue it."""

    def __init__(self, fleet: Fleet, runner: Runner, tokens: TokenGeneration, rendering: Rendering) -> None:
        self._fleet = fleet
        self._runner = runner
        self._continuation = ChatContinuation(rendering, runner, tokens)

    def decode(self, body: Json, request_id: str, session: str = "") -> Conversation:
        """Raises `InvalidRequest` for fields that no engine would take."""
        n, messages = check_sampling(body), body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message", param="messages")
        limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
        rollout = Terms.take(body, self._fleet, self._runner.lengths).rollout(
            request_id,
            _text_of(messages, session),
            n=n,
            prompt_tokens=sum(map(_characters, messages)) // _CHARACTERS_PER_TOKEN,
            limit=limit or DEFAULT_MAX_TOKENS,
            session=session,
        )
        return Conversation(rollout=rollout, body=body, limit=limit, inexact_of=self._continuation.inexact)

    async def generate(self, conversation: Conversation) -> Json:
        rollout = conversation.rollout
        with using(rollout):
            answer = await self._continuation.worded(conversation, await self._generated(conversation))
            if answer is None:
                answer = await self._generated(replace(conversation, reads_whole_reply=True))
        self._runner.learn(rollout, answer["usage"], [choice["finish_reason"] for choice in answer["choices"]])
        self._runner.count_missing(sum(choice.get(UNSCORED, 0) for choice in answer["choices"]))
        whole = {"object": "chat.completion", "prompt_logprobs": answer.get("prompt_logprobs")}
        return conversation.as_asked({**answer, **whole})

    async def _generated(self, conversation: Conversation) -> Json:
        """The reply, continued where it was cut off. Choices that were read in chunks have no message yet."""
        while True:
            reply = Reply()
            await self._runner.make(conversation, reply)
            if not reply.open:
                return conversation.told(reply)
            if (answer := await self._continuation.continued(conversation, reply)) is not None:
                return answer
            conversation.rollout.attempts.lost_tokens()


def _characters(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return len(str(message))
    return sum(_CHARACTERS_PER_MEDIUM if is_medium(part) else len(str(part)) for part in content)


def _text_of(messages: list[Any], session: str) -> str:
    """The text by which lengths are known; "" for a turn, which does not come again, and for parts such as images."""
    is_plain = all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
    return str(messages) if is_plain and not session else ""
