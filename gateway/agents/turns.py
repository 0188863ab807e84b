"""A turn as a conversation of /v1/chat/completions: engines render and parse it, and it is placed, continued after a
death and stamped as any other."""

from engines.engine import Json
from gateway.agents.turn import Answer, Turn
from gateway.dialects.raw_json import opened
from gateway.dialects.resumption.chat import RENDER
from gateway.dialects.token_generation import lacking
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.any_replica import AnyReplica

_RENDER_TIMEOUT_S = 60.0


def chat_request(turn: Turn) -> Json:
    """Return the body of a turn's conversation."""
    asked: Json = {"model": turn.model, "max_tokens": turn.max_tokens}
    if turn.tools:
        asked |= {"tools": turn.tools, "tool_choice": turn.tool_choice}
    given = {name: value for name, value in asked.items() if value is not None}
    return {"messages": turn.messages, **turn.template, **turn.sampling, **given}


def answer_of(reply: Json, answer_id: str) -> Answer:
    """Return the answer in a conversation's whole reply."""
    [choice] = opened(reply["choices"])
    usage = reply.get("usage") or {}
    return Answer(
        id=answer_id,
        model=reply["model"],
        message=choice["message"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_tokens=usage.get("completion_tokens") or 0,
    )


class TokenCounter:
    """Counts the tokens of a turn's prompt. `longest_wait_s` bounds the wait for a replica while none serves."""

    def __init__(self, fleet: Fleet, any_replica: AnyReplica, longest_wait_s: float) -> None:
        self._fleet = fleet
        self._any_replica = any_replica
        self._longest_wait_s = longest_wait_s

    async def count(self, turn: Turn) -> int:
        """Return the number of tokens. Raise the engine's refusal, or `UnknownRoute` where no engine renders."""
        model, _ = self._fleet.asked(turn.model)
        await self._fleet.serves_within(model, self._longest_wait_s)
        replicas = [replica for replica in self._fleet.alive if replica.info.model == model]
        able = [replica for replica in replicas if RENDER in replica.info.capabilities]
        if not able:
            raise lacking(f"{RENDER}, which counts tokens,", replicas)
        rendered = await self._any_replica.ask(able, "POST", RENDER, chat_request(turn), _RENDER_TIMEOUT_S)
        return len(rendered["token_ids"])
