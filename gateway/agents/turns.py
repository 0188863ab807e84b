"""Answers turns on the path of token ids: rendered by an engine, generated as any rollout, parsed by an engine.

Turns of a session are recorded there.
"""

from array import array
from dataclasses import dataclass

from engines.engine import Json
from engines.raw_json import opened
from gateway.agents.history import History, Prompt
from gateway.agents.session import Session
from gateway.agents.sessions import Sessions
from gateway.agents.tails import Tails
from gateway.agents.turn import Answer, Caller, Turn, chat_request
from gateway.dialects.chat import Chat
from gateway.dialects.rendering import RENDER, Rendering
from gateway.dialects.sample import Reply
from gateway.dialects.token_generation import TokenGeneration, lacking
from gateway.fleet.metrics import Deliveries
from gateway.fleet.placement.routing import Rollout


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn as a chat request, and as a prompt and a body of token ids; None where no engine of its model renders it.

    `reply` takes what engines make of the body.
    """

    turn: Turn
    caller: Caller
    session: Session | None
    rollout: Rollout
    chat: Json
    prompt: Prompt | None = None
    body: Json | None = None
    reply: Reply | None = None


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

    async def prepare(self, turn: Turn, caller: Caller) -> Prepared:
        """Render a turn. Raise what makes it impossible, before it is generated."""
        session = await self.sessions.entered(caller.client, caller.identity.id) if caller.identity else None
        history = session.history if session else History(lambda _: array("i"))
        prompt, chat = await history.prompt(turn, self.tails), chat_request(turn)
        if prompt is None:
            rollout = self.chat.decode(chat, caller.request_id, caller.placement)
            return Prepared(turn, caller, session, rollout, chat)
        scores = {} if session is None else {"logprobs": 0}
        body = {"model": turn.model, "token_ids": prompt.token_ids, "sampling_params": prompt.sampling | scores}
        body |= {"features": prompt.features} if prompt.features else {}
        rollout = self.tokens.decode(body, caller.request_id, caller.placement, caller.client)
        return Prepared(turn, caller, session, rollout, chat, prompt, body, Reply(prompt.token_ids))

    async def answer(self, prepared: Prepared, answer_id: str) -> Answer:
        """Generate the answer. It is continued where a replica ends or an update cuts it off.

        That of a session is recorded when this returns; where it raises, as far as it came.
        """
        turn, session = prepared.turn, prepared.session
        if session is None:
            choice, usage = await self._made(prepared)
        else:
            call = session.begin(turn, prepared.prompt, prepared.rollout.model, prepared.caller)
            async with session.under_way(call, prepared.reply):
                choice, usage = await self._made(prepared)
                await session.end(call, choice, usage, session.history.digest(turn, choice["message"]))
        self.deliveries.count(prepared.rollout.model, [choice])
        return _answer(answer_id, turn, choice, usage)

    async def _made(self, prepared: Prepared) -> tuple[Json, Json]:
        """Return the choice that was made, with its message, and the usage."""
        rollout, body, reply = prepared.rollout, prepared.body, prepared.reply
        if body is None or reply is None:
            told = await self.chat.generate(rollout, prepared.chat)
            return opened(told["choices"][0]), opened(told.get("usage")) or {}
        await self.tokens.make(rollout, body, reply)
        [sample] = reply.samples
        ends = {"finish_reason": sample.reason, "stop_reason": opened(sample.last.get("stop_reason"))}
        choice = {"index": 0, "token_ids": sample.token_ids, **ends, **sample.marks()}
        return choice | {"message": await self.rendering.message(prepared.chat, body["token_ids"], choice)}, reply.usage


def _answer(answer_id: str, turn: Turn, choice: Json, usage: Json) -> Answer:
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
