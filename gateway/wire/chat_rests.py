"""How a conversation goes on that an update has cut off: as token ids, and told as one in the engine's own words.

vLLM with --enable-scale-out (0.32 has them all) takes a conversation apart into three routes, used here in turn:

    /v1/chat/completions/render     the messages as token ids, and the sampling parameters that come of all fields
    /inference/v1/generate          the rest, made from the prompt's ids and those that were made (`TokenGeneration`)
    /v1/chat/completions/derender   text, reasoning and tool calls, parsed from all ids by the engine's own parsers

So the rules of `resumption.may_resume` hold for what the conversation comes to: a forced tool call is structured
output there, and begins anew. So does one whose prompt is rendered otherwise now than it was, one with images, and
whatever has a field that is not known here.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog

from engines.engine import Json
from engines.errors import EngineError, EngineFailed
from gateway.fleet import Fleet
from gateway.replica import Replica
from gateway.routing import Rollout
from gateway.wire.completions import Usage
from gateway.wire.resumption import joined_tokens, may_resume, places_cut_off, usage_of_whole
from gateway.wire.token_generation import TokenGeneration, rest_of

log = structlog.get_logger()

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"

_ASK_TIMEOUT_S = 60.0
# vLLM leaves out of rendered sampling parameters what is their default.
_DEFAULTS = {"max_tokens": 16, "n": 1}
# Fields that end in the rendered prompt or its sampling parameters, or that change nothing.
_KNOWN = frozenset(
    {
        "messages", "model", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
        "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "bad_words", "logit_bias", "allowed_token_ids", "logprobs", "top_logprobs",
        "prompt_logprobs", "structured_outputs", "response_format", "tools", "tool_choice", "reasoning_effort",
        "thinking_token_budget", "repetition_detection", "include_reasoning", "include_stop_str_in_output",
        "skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "documents", "chat_template", "chat_template_kwargs", "return_token_ids", "stream",
        "stream_options", "stream_interval", "cache_salt", "priority", "request_id", "user", "session_id",
        "prompt_cache_key",
    }
)  # fmt: skip
# Fields that ask for nothing with this value.
_NEUTRAL: Json = {
    "echo": False, "use_beam_search": False, "parallel_tool_calls": True, "return_tokens_as_token_ids": False,
    "return_prompt_text": False, "length_penalty": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opened:
    """Samples whose streams go on: the conversation as token ids, what was made of each, vLLM's state of its text."""

    asked: Json
    made: dict[int, Json]
    states: dict[int, Json]


class ChatRests:
    """Has the rests of conversations made, and told."""

    def __init__(self, fleet: Fleet, tokens: TokenGeneration) -> None:
        self._fleet = fleet
        self._tokens = tokens

    def resumes(self, rollout: Rollout, body: Json) -> bool:
        """Whether a conversation may go on from its tokens, as far as its own fields and the engines say."""
        is_known = all(
            field in _KNOWN or value is None or (field in _NEUTRAL and value == _NEUTRAL[field])
            for field, value in body.items()
        )
        return is_known and all(self._able(path, rollout) for path in (RENDER, DERENDER))

    async def gone_on(self, rollout: Rollout, body: Json, answer: Json) -> Json | None:
        """The reply with the rest of those choices that an update has cut off. None where it has to begin anew."""
        cut = [answer["choices"][place] for place in places_cut_off(answer)]
        asked = await self._rendered(rollout, body, cut[0]["prompt_token_ids"])
        if asked is None:
            return None
        try:
            async with asyncio.TaskGroup() as group:
                rests = [group.create_task(self._whole(rollout, asked, choice)) for choice in cut]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        told = await self._told(rollout, body, asked, cut, [task.result() for task in rests])
        if told is None:
            return None
        choices = [told.get(choice["index"], choice) for choice in answer["choices"]]
        usage = usage_of_whole(answer, choices)
        if usage.get("completion_tokens_details"):
            usage["completion_tokens_details"] = None  # of the first part alone
        return {**answer, "choices": choices, "usage": usage}

    async def opened(self, rollout: Rollout, body: Json, made: dict[int, Json]) -> "Opened | None":
        """What it takes to tell the rests of samples whose stream was cut off after `made`, by index.

        None where they cannot go on: not under a parser of vLLM's, which has told the end of what it held back when the
        stream was cut off.
        """
        asked = await self._rendered(rollout, body, next(iter(made.values()))["prompt_token_ids"])
        if asked is None:
            return None
        states: dict[int, Json] = {}
        for index, choice in made.items():
            first = {"index": 0, "token_ids": choice["token_ids"]}
            told = await self._ask(DERENDER, rollout, self._chunk_body(rollout, body, asked, first, None))
            if told is None or told["stream_state"].get("output_token_ids"):
                return None
            states[index] = told["stream_state"]
        return Opened(asked, made, states)

    async def stream(self, rollout: Rollout, body: Json, opened: "Opened", index: int) -> AsyncGenerator[Json]:
        """The choices of one sample's rest, chunk by chunk, as a conversation's."""
        state, one = opened.states[index], _one(rollout, index)
        async with aclosing(self._tokens.stream(*rest_of(one, opened.asked, opened.made[index]), Usage())) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    fields = {key: choice.get(key) for key in ("finish_reason", "stop_reason", "logprobs")}
                    said = {"index": 0, "token_ids": _said(choice, body), **fields}
                    told = await self._ask(
                        DERENDER, rollout, self._chunk_body(rollout, body, opened.asked, said, state)
                    )
                    if told is None:
                        raise EngineFailed(f"no replica of {rollout.model!r} tells the rest of a conversation")
                    state = told["stream_state"]
                    yield _as_chats_chunk(choice, told["chunk"]["choices"][0], body) | {"index": index}

    def _chunk_body(self, rollout: Rollout, body: Json, asked: Json, choice: Json, state: Json | None) -> Json:
        chunk = {"request_id": rollout.request_id, "choices": [choice]}
        model = {key: body[key] for key in ("model",) if body.get(key) is not None}
        told = {"generate_chunk": chunk, "stream_state": state, "chat_request": body}
        return {**model, "stream": True, **told, "prompt_token_ids": asked["token_ids"]}

    async def _rendered(self, rollout: Rollout, body: Json, read: list[int]) -> Json | None:
        """The conversation as token ids, where it is one that may go on; `read` are those that the engine has read."""
        rendered = await self._ask(RENDER, rollout, body)
        if rendered is None or rendered.get("features") or rendered["token_ids"] != read:
            return None
        sampling = _DEFAULTS | rendered["sampling_params"]
        passed = {key: body[key] for key in ("model", "cache_salt", "priority") if body.get(key) is not None}
        return passed | {"token_ids": read, "sampling_params": sampling} if may_resume(sampling) else None

    async def _whole(self, rollout: Rollout, asked: Json, choice: Json) -> Json:
        """All tokens of a choice: those that it was cut off with, and the rest."""
        rest = await self._tokens.generate(*rest_of(_one(rollout, choice["index"]), asked, choice))
        return joined_tokens(choice | {"logprobs": _by_id(choice)}, rest["choices"][0])

    async def _told(
        self, rollout: Rollout, body: Json, asked: Json, cut: Sequence[Json], whole: Sequence[Json]
    ) -> dict[int, Json] | None:
        """These choices as a conversation's, out of all of their tokens, by index."""
        fields = ("index", "finish_reason", "stop_reason", "logprobs")
        choices = [
            {key: choice.get(key) for key in fields} | {"token_ids": _said(choice, body) or choice["token_ids"]}
            for choice in whole
        ]
        prompt = {"prompt_token_ids": asked["token_ids"]}
        reply = {"request_id": rollout.request_id, "choices": choices, **prompt}
        model = {key: body[key] for key in ("model",) if body.get(key) is not None}
        answer = await self._ask(
            DERENDER, rollout, {**model, "generate_response": reply, "chat_request": body, **prompt}
        )
        if answer is None:
            return None
        told = zip(cut, whole, answer["choices"], strict=True)
        return {first["index"]: _as_chat(first, choice, one, body) for first, choice, one in told}

    async def _ask(self, path: str, rollout: Rollout, body: Json) -> Json | None:
        """The answer of the first replica that gives one; they do so in an update too. None where none does."""
        for replica in self._able(path, rollout):
            try:
                return await replica.engine.ask("POST", path, body, _ASK_TIMEOUT_S)
            except EngineError as error:
                log.warning("conversation begins anew", request=rollout.request_id, error=str(error))
        return None

    def _able(self, path: str, rollout: Rollout) -> list[Replica]:
        return [
            replica
            for replica in self._fleet.alive
            if replica.info.model == rollout.model
            and path in replica.info.capabilities
            and (rollout.adapter is None or replica.holds(rollout.adapter))
        ]


def _one(rollout: Rollout, index: int) -> Rollout:
    return replace(rollout, request_id=f"{rollout.request_id}-{index}", n=1, goes_on=True)


def _by_id(choice: Json) -> Json | None:
    """The log-probs of a conversation's choice as those of token ids. Its candidates have names alone."""
    if not choice.get("logprobs"):
        return None
    entries = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    return {"content": [{"token_id": token_id, "logprob": entry["logprob"]} for token_id, entry in entries]}


def _said(choice: Json, body: Json) -> list[int]:
    """The tokens whose text is told. vLLM leaves out the one that ends a choice, and derenders what it is given."""
    is_told = choice["finish_reason"] != "stop" or body.get("include_stop_str_in_output")
    return list(choice["token_ids"] if is_told else choice["token_ids"][:-1])


def _as_chat(first: Json, whole: Json, told: Json, body: Json) -> Json:
    """One choice of a conversation: all its tokens, as `told` by the engine; it was cut off as `first`."""
    message = told["message"] if _said(whole, body) else first["message"]
    calls = message.get("tool_calls") and body.get("tool_choice") in (None, "auto")
    choice = first | {
        "message": message,
        "logprobs": whole["logprobs"] and _as_chats_logprobs(first, told, body.get("top_logprobs") or 0),
        "finish_reason": "tool_calls" if calls else whole["finish_reason"],
        **{key: whole.get(key) for key in ("stop_reason", "token_ids", "weight_versions", "kv_versions")},
    }
    del choice["prompt_token_ids"]  # a conversation tells them once
    return choice


def _as_chats_chunk(choice: Json, told: Json, body: Json) -> Json:
    """One choice of a streamed conversation: the tokens of `choice`, as `told` by the engine."""
    delta = {key: value for key, value in told["delta"].items() if value not in (None, [])}
    top = body.get("top_logprobs") or 0
    logprobs = choice.get("logprobs") and _as_chats_logprobs({"logprobs": None}, told, top)
    return {key: value for key, value in choice.items() if key != "prompt_token_ids"} | {
        "delta": delta or {"content": ""},
        "logprobs": logprobs,
    }


def _as_chats_logprobs(first: Json, told: Json, top: int) -> Json:
    before = first["logprobs"]["content"] if first["logprobs"] else []
    after = told["logprobs"]["content"][len(before) :]
    if top >= 0:
        after = [entry | {"top_logprobs": entry["top_logprobs"][:top]} for entry in after]
    return {"content": before + after}
