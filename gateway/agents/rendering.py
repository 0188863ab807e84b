"""Engines turn a chat request into token ids, and sampled token ids into an assistant's message."""

from dataclasses import dataclass

from engines.engine import Json
from gateway.dialects.own_fields import common_room
from gateway.dialects.resumption.chat import DERENDER, NO_WORDS, RENDER, RENDERED_DEFAULTS, derender_body, visible_ids
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.fleet.replica import Replica

_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rendering:
    """Asks the engines of a model; `longest_wait_s` bounds the wait for one while none serves."""

    fleet: Fleet
    any_replica: AnyReplica
    longest_wait_s: float

    async def render(self, chat: Json) -> Json | None:
        """Return the `token_ids`, `sampling_params` and `features` of a chat request; None where no engine of its model
        has both routes. Raise the engine's refusal."""
        model, _ = self.fleet.asked(chat.get("model"))
        await self.fleet.serves_within(model, self.longest_wait_s)
        if not (able := self._able(chat)):
            return None
        rendered = await self.any_replica.ask(able, "POST", RENDER, chat, _ASK_TIMEOUT_S)
        return rendered | {"sampling_params": RENDERED_DEFAULTS | rendered["sampling_params"]}

    async def message(self, chat: Json, prompt: list[int], choice: Json) -> Json:
        """Return the message of a choice of token ids, as the engine's own parsers of reasoning and calls read it."""
        if not (token_ids := visible_ids(choice, chat)):
            return NO_WORDS
        model, _ = self.fleet.asked(chat.get("model"))
        await self.fleet.serves_within(model, self.longest_wait_s)  # the replica that made it may have ended since
        ends = {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
        asked = derender_body("", chat, prompt, [{"index": 0, "token_ids": token_ids, "logprobs": None, **ends}])
        parsed = await self.any_replica.ask(self._able(chat), "POST", DERENDER, asked, _ASK_TIMEOUT_S)
        message: Json = parsed["choices"][0]["message"]
        return message

    def room(self, name: str | None) -> int | None:
        """Return the most tokens of a prompt with its answer; None where no replica tells."""
        return common_room(self.fleet, self.fleet.asked(name)[0])

    def replicas(self, name: str | None) -> list[Replica]:
        """Return the replicas of a model or of an adapter."""
        model, adapter = self.fleet.asked(name)
        ours = (replica for replica in self.fleet.alive if replica.info.model == model)
        return [replica for replica in ours if adapter is None or replica.holds(adapter)]

    def _able(self, chat: Json) -> list[Replica]:
        return [
            replica
            for replica in self.replicas(chat.get("model"))
            if {RENDER, DERENDER}.issubset(replica.info.capabilities)
        ]
