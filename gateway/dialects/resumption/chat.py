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
from gateway.dialects.completions import Usage
from gateway.dialects.resumption.tokens import joined_tokens, may_resume, places_cut_off, usage_of_whole
from gateway.dialects.resumption.told_chat import ToldChat, ToldSample
from gateway.dialects.token_generation import TokenGeneration, rest_of
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout

log = structlog.get_logger()

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"

_ASK_TIMEOUT_S = 60.0
# vLLM leaves out of rendered sampling parameters what is their default.
_DEFAULTS = {"max_tokens": 16, "n": 1}
_LONGEST_BEFORE = 4  # tokens that vLLM looks at for the beginning of a character
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
    """Samples whose streams go on: the conversation as token ids, what was made of each, vLLM's state of its text.

    `told` are the chunks that they were cut off with, without what a parser took for the end.
    """

    asked: Json
    made: dict[int, Json]
    states: dict[int, Json]
    told: list[Json]


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

    async def opened(self, rollout: Rollout, body: Json, made: dict[int, Json], told: ToldChat) -> "Opened | None":
        """What it takes to tell the rests of samples whose stream was cut off after `made`, by index, and after `told`.

        None where they cannot go on.
        """
        asked = await self._rendered(rollout, body, next(iter(made.values()))["prompt_token_ids"])
        if asked is None:
            return None
        opened = Opened(asked, made, {}, [])
        try:
            for index in made:
                await self._open(rollout, body, opened, index, told.samples[index])
        except EngineFailed as error:
            log.warning("stream ends where it was cut off", request=rollout.request_id, error=str(error))
            return None
        return opened

    async def _open(self, rollout: Rollout, body: Json, opened: "Opened", index: int, sample: ToldSample) -> None:
        told = await self._chunk(rollout, body, opened, _ids_alone(sample.token_ids), None)
        state = sample.resumed(told["stream_state"])
        if sample.kept is not None:
            told = await self._chunk(rollout, body, opened, _ids_alone(sample.kept.get("token_ids") or []), state)
            state = told["stream_state"]
            opened.told.append(sample.kept | {"delta": _delta(told["chunk"]["choices"][0])})
        opened.states[index] = state

    async def stream(self, rollout: Rollout, body: Json, opened: "Opened", index: int) -> AsyncGenerator[Json]:
        """The choices of one sample's rest, chunk by chunk, as a conversation's."""
        one = _one(rollout, index)
        async with aclosing(self._tokens.stream(*rest_of(one, opened.asked, opened.made[index]), Usage())) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    yield await self._as_chunk(rollout, body, opened, index, choice)

    async def _as_chunk(self, rollout: Rollout, body: Json, opened: "Opened", index: int, choice: Json) -> Json:
        """A choice of a stream of token ids as one of this conversation's."""
        fields = {key: choice.get(key) for key in ("finish_reason", "stop_reason", "logprobs")}
        said, state = _ids_alone(_said(choice, body)) | fields, opened.states[index]
        answer = await self._chunk(rollout, body, opened, said, state)
        opened.states[index], (told,) = answer["stream_state"], answer["chunk"]["choices"]
        if said["logprobs"] and not told.get("logprobs"):
            told["logprobs"] = await self._named(rollout, body, opened, said, state)
        return _as_chats_chunk(choice, told, body) | {"index": index}

    async def _named(self, rollout: Rollout, body: Json, opened: "Opened", choice: Json, state: Json) -> Json:
        """A chunk's log-probs with the names of their tokens, which vLLM does not tell in a stream under a parser.

        The tokens before are asked for too: a character may begin in them.
        """
        before = [{"token_id": token_id, "logprob": 0.0} for token_id in state["output_token_ids"][-_LONGEST_BEFORE:]]
        entries = before + choice["logprobs"]["content"]
        whole = choice | {"token_ids": [entry["token_id"] for entry in entries], "logprobs": {"content": entries}}
        answer = await self._ask(DERENDER, rollout, _whole_body(rollout, body, opened.asked, [whole]))
        if answer is None:
            raise _nobody_tells(rollout)
        return {"content": answer["choices"][0]["logprobs"]["content"][len(before) :]}

    async def _chunk(self, rollout: Rollout, body: Json, opened: "Opened", choice: Json, state: Json | None) -> Json:
        """A choice of a stream of token ids as a conversation's chunk, and vLLM's state after it."""
        told = await self._ask(DERENDER, rollout, _chunk_body(rollout, body, opened.asked, choice, state))
        if told is None:
            raise _nobody_tells(rollout)
        return told

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
        answer = await self._ask(DERENDER, rollout, _whole_body(rollout, body, asked, choices))
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


def _whole_body(rollout: Rollout, body: Json, asked: Json, choices: list[Json]) -> Json:
    reply = {"request_id": rollout.request_id, "choices": choices}
    prompt = {"prompt_token_ids": asked["token_ids"]}
    return _model(body) | {"generate_response": reply | prompt, "chat_request": body, **prompt}


def _chunk_body(rollout: Rollout, body: Json, asked: Json, choice: Json, state: Json | None) -> Json:
    chunk = {"request_id": rollout.request_id, "choices": [choice]}
    told = {"generate_chunk": chunk, "stream_state": state, "chat_request": body}
    return _model(body) | {"stream": True, **told, "prompt_token_ids": asked["token_ids"]}


def _model(body: Json) -> Json:
    return {key: body[key] for key in ("model",) if body.get(key) is not None}


def _ids_alone(token_ids: list[int]) -> Json:
    return {"index": 0, "token_ids": token_ids}


def _nobody_tells(rollout: Rollout) -> EngineFailed:
    return EngineFailed(f"no replica of {rollout.model!r} tells the rest of a conversation")


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
    top = body.get("top_logprobs") or 0
    calls = choice["finish_reason"] == "stop" and told["finish_reason"] == "tool_calls"
    return {key: value for key, value in choice.items() if key != "prompt_token_ids"} | {
        "delta": _delta(told),
        "logprobs": choice.get("logprobs") and _as_chats_logprobs({"logprobs": None}, told, top),
        "finish_reason": "tool_calls" if calls else choice["finish_reason"],
    }


def _delta(told: Json) -> Json:
    return {key: value for key, value in told["delta"].items() if value not in (None, [])}


def _as_chats_logprobs(first: Json, told: Json, top: int) -> Json:
    before = first["logprobs"]["content"] if first["logprobs"] else []
    after = told["logprobs"]["content"][len(before) :]
    if top >= 0:
        after = [entry | {"top_logprobs": entry["top_logprobs"][:top]} for entry in after]
    return {"content": before + after}
