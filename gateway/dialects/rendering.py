"""Engines turn a chat request into token ids, and sampled token ids into an assistant's message.

vLLM with --enable-scale-out (all from 0.32 on) has the routes for it:

    /v1/chat/completions/render     the messages as token ids, and the sampling parameters that all fields come to
    /v1/chat/completions/derender   text, reasoning and tool calls, parsed from token ids by the engine's own parsers
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, UnknownModel
from gateway.dialects.sampling import common_room
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.fleet.replica import Replica

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"

_ASK_TIMEOUT_S = 60.0
# vLLM leaves defaults out of rendered sampling parameters.
_DEFAULTS = {"max_tokens": 16, "n": 1}
_NO_WORDS: Json = {"role": "assistant", "content": "", "tool_calls": []}
_READ = ("index", "finish_reason", "stop_reason", "logprobs")


@dataclass(frozen=True, slots=True)
class Rendering:
    """Asks the engines of a chat request's model; `longest_wait_s` bounds the wait for one while none serves."""

    fleet: Fleet
    any_replica: AnyReplica
    longest_wait_s: float

    async def render(self, chat: Json) -> Json | None:
        """Return the `token_ids`, `sampling_params` and `features` of a chat request; None where no engine of its model
        has both routes. Raise the engine's refusal."""
        model, _ = self._asked(chat.get("model") or None)
        if not self.renders(chat):  # perhaps none has joined yet
            await self.fleet.serves_within(model, self.longest_wait_s)
        if not self.renders(chat):
            return None
        rendered = await self._ask(RENDER, chat, chat)
        return rendered | {"sampling_params": _DEFAULTS | rendered["sampling_params"]}

    async def message(self, chat: Json, prompt: list[int], choice: Json) -> Json:
        """Return the message of a choice of token ids, as the engine's own parsers of reasoning and calls read it."""
        [parsed] = await self.messages(chat, prompt, [choice | {"logprobs": None}])
        message: Json = parsed["message"]
        return message

    async def messages(self, chat: Json, prompt: list[int], choices: Sequence[Json]) -> list[Json]:
        """Return choices of token ids as choices of a chat reply, in the same order."""
        asked = [
            {key: choice.get(key) for key in _READ} | {"token_ids": _parsed_ids(choice, chat)}
            for choice in choices
            if choice["token_ids"]  # engines refuse a choice without
        ]
        parsed: dict[int, Json] = {}
        if asked:
            reply = {"request_id": "", "choices": asked, "prompt_token_ids": prompt}
            body = {"generate_response": reply, "chat_request": chat, "prompt_token_ids": prompt}
            model = {"model": chat["model"]} if chat.get("model") is not None else {}
            answer = await self._ask(DERENDER, chat, body | model)
            parsed = {choice["index"]: choice for choice in answer["choices"]}
        told = [parsed[choice["index"]] if choice["token_ids"] else {"message": _NO_WORDS} for choice in choices]
        for choice, worded in zip(choices, told, strict=True):
            stop, text = choice.get("stop_reason"), worded["message"].get("content") or ""
            if isinstance(stop, str) and stop in text and not chat.get("include_stop_str_in_output"):
                worded["message"] = worded["message"] | {"content": text.rpartition(stop)[0]}
            elif not visible_ids(choice, chat):  # a stop token alone
                worded["message"] = worded["message"] | {"content": ""}
        return told

    def renders(self, chat: Json) -> bool:
        """True where an engine of the chat's model has both routes."""
        return bool(self._able(chat))

    def room(self, name: str | None) -> int | None:
        """Return the most tokens of a prompt with its answer; None where no replica tells."""
        return common_room(self.fleet, self._asked(name)[0])

    def _asked(self, name: str | None) -> tuple[str, Adapter | None]:
        """The model and the adapter of this name. What uses an adapter goes on where it is unloaded, and engines of the
        policy hold it so long."""
        try:
            return self.fleet.asked(name)
        except UnknownModel:
            if name is None or not self.fleet.adapters.was_loaded(name):
                raise
            return self.fleet.models.first, None

    def replicas(self, name: str | None) -> list[Replica]:
        """Return the replicas of a model or of an adapter."""
        model, adapter = self._asked(name)
        ours = (replica for replica in self.fleet.alive if replica.info.model == model)
        return [replica for replica in ours if adapter is None or replica.holds(adapter)]

    def _able(self, chat: Json) -> list[Replica]:
        """The replica that was heard last comes first: often it made the reply."""
        able = [one for one in self.replicas(chat.get("model") or None) if {RENDER, DERENDER} <= one.info.capabilities]
        return sorted(able, key=lambda one: -one.evidence.answered_at)

    async def _ask(self, path: str, chat: Json, body: Json) -> Json:
        """The answer of a replica, which they give in an update too. Where all fail and none serves it waits for one,
        as a rollout does."""
        model, _ = self._asked(chat.get("model") or None)
        try:
            return await self.any_replica.ask(self._able(chat), "POST", path, body, _ASK_TIMEOUT_S)
        except (EngineError, DeadlineExceeded):
            if self.fleet.serving(model) or not await self.fleet.serves_within(model, self.longest_wait_s):
                raise
        return await self.any_replica.ask(self._able(chat), "POST", path, body, _ASK_TIMEOUT_S)


def visible_ids(choice: Json, chat: Json) -> list[int]:
    """The tokens whose text the client sees. vLLM leaves out the stop token, and derenders all that it is given."""
    shows_last = choice["finish_reason"] != "stop" or chat.get("include_stop_str_in_output")
    return list(choice["token_ids"] if shows_last else choice["token_ids"][:-1])


def _parsed_ids(choice: Json, chat: Json) -> list[int]:
    """The tokens that are parsed; with those of a stop string, which may have other text too."""
    token_ids: list[int] = choice["token_ids"]
    return token_ids if isinstance(choice.get("stop_reason"), str) else visible_ids(choice, chat) or token_ids
