"""Answers turns on the path of token ids: rendered by an engine, generated as any rollout, parsed by an engine.

Turns of a session are recorded there.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from engines.engine import Json
from engines.raw_json import opened
from gateway.agents.history import History
from gateway.agents.sessions import Sessions
from gateway.agents.tails import Tails
from gateway.agents.turn import Answer, Caller, Turn, chat_request
from gateway.dialects.chat import Chat, Conversation
from gateway.dialects.rendering import RENDER, Rendering
from gateway.dialects.sample import Reply
from gateway.dialects.token_generation import TokenGeneration, TokenPrompt, lacking
from gateway.fleet.metrics import Deliveries
from gateway.fleet.placement.routing import Rollout


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of all dialects. Where no engine renders, the chat itself is generated."""

    rendering: Rendering
    tokens: TokenGeneration
    chat: Chat
    deliveries: Deliveries
    sessions: Sessions
    tails: Tails

    async def count(self, turn: Turn) -> int:
        """Return the number of tokens of a prompt. Raise `UnknownRoute` where no engine renders it."""
        rendered = await self.rendering.render(chat_request(turn))
        if rendered is None:
            raise lacking(f"{RENDER}, which counts tokens,", self.rendering.replicas(turn.model))
        return len(rendered["token_ids"])

    async def answer(self, turn: Turn, caller: Caller, answer_id: str, begun: Callable[[], None]) -> Answer:
        """Answer a turn. `begun` is called once it is rendered. An answer goes on where a replica ends, or an update
        cuts it off.

        That of a session is recorded when this returns; where it raises, as far as it came.
        """
        session = self.sessions.entered(caller.client, caller.identity.id) if caller.identity else None
        history = session.history if session else History(lambda _: array("i"))
        prompt, chat = await history.prompt(turn, self.tails), chat_request(turn)
        if prompt is None:
            conversation, reply = self.chat.decode(chat, caller.request_id, caller.placement), None
            rollout, make = conversation.rollout, partial(self._chatted, conversation)
        else:
            sampling = prompt.sampling | ({} if session is None else {"logprobs": 0})
            body = {"model": turn.model, "token_ids": prompt.token_ids, "sampling_params": sampling}
            body |= {"features": prompt.features} if prompt.features else {}
            asked = self.tokens.decode(body, caller.request_id, caller.placement, caller.client)
            reply = Reply(prompt.token_ids)
            rollout, make = asked.rollout, partial(self._generated, asked, chat, reply)
        begun()
        if session is None:
            return self._told(turn, answer_id, rollout, *await make())
        call = session.begin(turn, prompt, rollout.model, caller)
        async with session.under_way(call, reply):
            choice, usage = await make()
            await session.end(call, choice, usage, history.digest(turn, choice["message"]))
        answer = self._told(turn, answer_id, rollout, choice, usage)
        return replace(answer, undelivered=partial(session.undelivered, call))

    def _told(self, turn: Turn, answer_id: str, rollout: Rollout, choice: Json, usage: Json) -> Answer:
        self.deliveries.count(rollout.model, [choice])
        self.deliveries.count_tokens(rollout.model, usage)
        message = choice["message"]
        calls = choice["finish_reason"] == "stop" and message.get("tool_calls")
        return Answer(
            id=answer_id,
            model=turn.model or "",
            message=message,
            finish_reason="tool_calls" if calls else choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            num_prompt_tokens=usage.get("prompt_tokens") or 0,
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            num_tokens=usage.get("completion_tokens") or 0,
        )

    async def _chatted(self, conversation: Conversation) -> tuple[Json, Json]:
        """Return the choice of a conversation, and the usage."""
        told = await self.chat.generate(conversation)
        return opened(told["choices"][0]), opened(told.get("usage")) or {}

    async def _generated(self, asked: TokenPrompt, chat: Json, reply: Reply) -> tuple[Json, Json]:
        """Return the choice of token ids, with its message, and the usage."""
        await self.tokens.make(asked, reply)
        [sample] = reply.samples
        ends = {"finish_reason": sample.reason, "stop_reason": opened(sample.last.get("stop_reason"))}
        choice = {"index": 0, "token_ids": sample.token_ids, **ends, **sample.marks()}
        return choice | {"message": await self.rendering.message(chat, asked.body["token_ids"], choice)}, reply.usage
