"""Answers turns on the path of token ids: rendered by an engine, generated as any rollout, parsed by an engine."""

from dataclasses import dataclass

from engines.engine import Json
from gateway.agents.rendering import Rendering
from gateway.agents.turn import Answer, Turn, chat_request
from gateway.dialects.chat import Chat
from gateway.dialects.raw_json import opened
from gateway.dialects.resumption.chat import RENDER
from gateway.dialects.token_generation import TokenGeneration, lacking
from gateway.fleet.metrics import Deliveries
from gateway.fleet.placement.routing import Rollout

# For clients that name no limit, such as Codex: a model that repeats itself would fill the whole context.
_MAX_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is: `client` as its key has it, `session` for placement."""

    request_id: str
    client: str
    session: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn as a chat request, and as a body of token ids; None where no engine of its model renders it."""

    turn: Turn
    rollout: Rollout
    chat: Json
    body: Json | None


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of all dialects. Where no engine renders, the chat itself is generated."""

    rendering: Rendering
    tokens: TokenGeneration
    chat: Chat
    deliveries: Deliveries

    async def count(self, turn: Turn) -> int:
        """Return the number of tokens of a prompt. Raise `UnknownRoute` where no engine renders it."""
        rendered = await self.rendering.render(chat_request(turn))
        if rendered is None:
            raise lacking(f"{RENDER}, which counts tokens,", self.rendering.replicas(turn.model))
        return len(rendered["token_ids"])

    async def prepare(self, turn: Turn, caller: Caller) -> Prepared:
        """Render a turn. Raise what makes it impossible, before a stream has begun."""
        chat = chat_request(turn)
        rendered = await self.rendering.render(chat)
        if rendered is None:
            return Prepared(turn, self.chat.decode(chat, caller.request_id, caller.session), chat, None)
        body = _token_request(turn, rendered)
        rollout = self.tokens.decode(body, caller.request_id, caller.session, caller.client)
        return Prepared(turn, rollout, chat, body)

    async def answer(self, prepared: Prepared, answer_id: str) -> Answer:
        """Generate the answer. It is continued where a replica ends or an update cuts it off."""
        rollout, chat, body = prepared.rollout, prepared.chat, prepared.body
        reply = await (self.chat.generate(rollout, chat) if body is None else self.tokens.generate(rollout, body))
        self.deliveries.count(rollout.model, reply["choices"])
        choice: Json = opened(reply["choices"][0])
        if body is not None:
            choice["message"] = await self.rendering.message(chat, body["token_ids"], choice)
        return _answer(answer_id, prepared.turn, choice, opened(reply).get("usage") or {})


def _token_request(turn: Turn, rendered: Json) -> Json:
    sampling = dict(rendered["sampling_params"])
    if turn.max_tokens is None:
        sampling["max_tokens"] = min(sampling["max_tokens"], _MAX_TOKENS)
    body = {"model": turn.model, "token_ids": rendered["token_ids"], "sampling_params": sampling}
    return body | ({"features": rendered["features"]} if rendered.get("features") else {})


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
