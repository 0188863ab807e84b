"""/v1/completions of vLLM's dialect: one request becomes one rollout per prompt, and their replies one reply again."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from engines.engine import Json
from engines.errors import EngineRefused, InvalidRequest
from gateway.config.schema import GatewayConfig
from gateway.dialects.assembly import assemble, is_read_streamed
from gateway.dialects.freshness import FIELDS, read_freshness
from gateway.dialects.merged import merged
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import (
    begun_or_anew,
    joined,
    mark_cut_off,
    may_resume,
    places_cut_off,
    rest_body,
    usage_of_whole,
    whole_characters,
)
from gateway.dialects.spans import stamp_versions
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout
from gateway.fleet.scheduler import Scheduler, using

PATH = "/v1/completions"

# vLLM's own default of max_tokens in this dialect.
_DEFAULT_MAX_TOKENS = 16
_CHARACTERS_PER_TOKEN = 4
_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: its place there, and the body that asks one replica for its completions.

    `made` are the tokens that an update has cut it off after, which are read after the prompt; it has one sample then.
    `has_text` where their text was told.
    """

    request_id: str
    index: int
    rollout: Rollout
    body: Json
    made: tuple[int, ...] = ()
    has_text: bool = False


class Completions:
    """Decodes requests, has their prompts generated, assembles replies prompt-major."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler

    def decode(self, body: Json, request_id: str, session: str = "", first: int = 0) -> list[Prompt]:
        """The prompts of a request. Raises `InvalidRequest` before any replica has work, naming field and prompt.

        A turn of `session` has one prompt; many are no turn of anything, and are spread over all replicas.
        Prompts are numbered from `first` on.
        """
        model, adapter = self._fleet.asked(body.get("model"))
        n = check_sampling(body, self._config.max_n)
        lengths = [replica.info.max_model_len for replica in self._fleet.alive if replica.info.model == model]
        max_len = min((length for length in lengths if length is not None), default=None)
        fresh = read_freshness(body, self._fleet, model)
        rest = {key: value for key, value in body.items() if key not in ("prompt", "stream", *FIELDS)}
        prompts, values = [], _prompt_list(body)
        for index, value in enumerate(values, first):
            length = _checked_length(index, value, max_len)
            limit = body.get("max_tokens") or body.get("max_completion_tokens") or _DEFAULT_MAX_TOKENS
            tokens = length + n * min(limit, max_len or limit)
            rollout = Rollout(
                request_id=f"{request_id}-{index}",
                model=model,
                n=n,
                tokens=tokens,
                min_version=fresh.min_version,
                max_staleness=fresh.max_staleness,
                session=session if len(values) == 1 else "",
                adapter=adapter,
            )
            prompts.append(Prompt(request_id, index, rollout, {**rest, "prompt": value}))
        return prompts

    async def generate(self, prompts: Sequence[Prompt]) -> Json:
        """One reply for all prompts. The first prompt that an engine refuses ends the others."""
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate_one(prompt)) for prompt in prompts]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        answers = [task.result() for task in tasks]
        for choice in (choice for answer in answers for choice in answer["choices"]):
            _hide_ids(choice, prompts[0].body)
        return _assemble(answers, prompts)

    async def stream(self, prompts: Sequence[Prompt], usage: "Usage | None" = None) -> AsyncGenerator[Json]:
        """Chunks of all prompts as they come, numbered as if one engine had made them. `usage` is counted up."""
        usage, last = Usage() if usage is None else usage, Json()

        async def one(prompt: Prompt) -> AsyncGenerator[Json]:
            async with aclosing(self._stream_one(prompt)) as chunks:
                async for chunk in chunks:
                    usage.add_chunk(prompt.index, chunk.get("usage"))
                    if chunk["choices"]:
                        for choice in chunk["choices"]:
                            _hide_ids(choice, prompt.body)
                        yield with_usage_rule(chunk, prompt.body)

        async with aclosing(merged(one(prompt) for prompt in prompts)) as chunks:
            async for last in chunks:
                yield last
        if wants_usage(prompts[0].body):
            yield {**last, "choices": [], "usage": usage.total()}

    async def _generate_one(self, prompt: Prompt) -> Json:
        async def call(replica: Replica) -> Json:
            check_replica(prompt.body, replica)
            flight = replica.take_off()
            try:
                answer = await self._answer(prompt, replica)
            except EngineRefused as error:
                raise _naming_prompt(error, prompt.index) from error
            mark_cut_off(answer, replica, _read(answer), resumes=may_resume(prompt.body))
            await replica.vouched()
            stamp_versions(answer, flight, prompt.rollout.adapter)
            return answer

        with using(prompt.rollout):  # also between what was cut off and its rest
            return await self._gone_on(prompt, await self._scheduler.run(prompt.rollout, call))

    async def _gone_on(self, prompt: Prompt, answer: Json) -> Json:
        """The reply with the rest of those choices that an update has cut off."""
        cut = places_cut_off(answer)
        if not cut:
            return answer
        choices = list(answer["choices"])
        try:
            async with asyncio.TaskGroup() as group:
                rests = {
                    place: group.create_task(self._generate_one(_rest_of(prompt, choices[place]))) for place in cut
                }
        except* Exception as errors:
            raise errors.exceptions[0] from None
        for place, rest in rests.items():
            choices[place] = joined(choices[place], rest.result()["choices"][0])
        return {**answer, "choices": choices, "usage": usage_of_whole(answer, choices)}

    async def _answer(self, prompt: Prompt, replica: Replica) -> Json:
        timeout_s = self._config.generate_timeout_s
        body = asked_of_engine(prompt.body, replica.weight_version, prompt.rollout.adapter)
        if prompt.made:
            made = list(prompt.made)
            if prompt.has_text:  # an engine without a tokenizer tells none, and could not be asked
                made = await whole_characters(made, partial(_detokenized, replica, prompt.body.get("model")))
            body = rest_body(body, [*body["prompt"], *made], len(made))
        if not is_read_streamed(body, replica.info):
            return await replica.engine.generate(PATH, body, timeout_s)
        chunks = replica.engine.stream(PATH, body | {"stream_options": {"include_usage": True}}, timeout_s)
        return await assemble(chunks, prompt.rollout.n, replica.replica_id)

    async def _stream_one(self, prompt: Prompt) -> AsyncGenerator[Json]:
        n, usage = prompt.rollout.n, Json()
        indexes, rest_usage = range(prompt.index * n, (prompt.index + 1) * n), Usage()
        stream = CutStream(indexes, prompt.rollout.adapter, resumes=may_resume(prompt.body))
        with using(prompt.rollout):
            async for chunk in self._stream_first(prompt, stream):
                usage = chunk.get("usage") or usage
                yield chunk
            rests = [_rest_of(prompt, cut, index) for index, cut in stream.cut_off().items()]
            if not rests:
                return
            async with aclosing(self.stream(rests, rest_usage)) as chunks:
                async for chunk in chunks:
                    for choice in chunk["choices"]:
                        stream.follow(choice)
                    yield chunk | {"usage": stream.usage(usage, rest_usage.total())}
            yield chunk | {"choices": [], "usage": stream.usage(usage, rest_usage.total())}

    async def _stream_first(self, prompt: Prompt, stream: CutStream) -> AsyncGenerator[Json]:
        """The chunks up to where an update cuts them off."""
        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            check_replica(prompt.body, replica)
            flight = replica.take_off()
            body = {
                **asked_of_engine(prompt.body, replica.weight_version, prompt.rollout.adapter),
                "stream_options": {**(prompt.body.get("stream_options") or {}), "include_usage": True},
            }
            if prompt.made:
                body = rest_body(body, [*body["prompt"], *prompt.made], len(prompt.made))
            chunks = replica.engine.stream(PATH, body, self._config.generate_timeout_s)
            return begun_or_anew(chunks, replica)

        async for replica, chunk in self._scheduler.stream(prompt.rollout, call):
            chunk["id"] = f"cmpl-{prompt.request_id}"
            for choice in chunk["choices"]:
                choice["index"] += prompt.index * prompt.rollout.n
                stream.see(choice, replica, flight)
            yield chunk


class Usage:
    """Token counts over the prompts of one request."""

    def __init__(self) -> None:
        self._by_prompt: dict[int, Json] = {}

    def add_chunk(self, index: int, usage: Json | None) -> None:
        """A later count of the same prompt replaces an earlier one."""
        if usage:
            self._by_prompt[index] = usage

    def total(self) -> Json:
        usages = list(self._by_prompt.values())
        counted = {key: sum(usage.get(key) or 0 for usage in usages) for key in ("prompt_tokens", "completion_tokens")}
        total: Json = {**counted, "total_tokens": sum(counted.values())}
        if details := [usage["prompt_tokens_details"] for usage in usages if usage.get("prompt_tokens_details")]:
            total["prompt_tokens_details"] = {"cached_tokens": sum(one.get("cached_tokens") or 0 for one in details)}
        return total


def check_sampling(body: Json, max_n: int) -> int:
    """The number of samples asked for. Refuses what every engine would refuse, before the work is spread."""
    n, temperature = body.get("n", 1), body.get("temperature", 1.0)
    if "prompt_embeds" in body:
        raise InvalidRequest("prompt_embeds is refused: tensors are not read from requests", param="prompt_embeds")
    if type(n) is not int or not 1 <= n <= max_n:
        raise InvalidRequest(f"n = {n!r} is not between 1 and gateway.max_n = {max_n}", param="n")
    if n > 1 and temperature == 0:
        raise InvalidRequest(f"n = {n} with temperature = 0 would repeat one completion: use n = 1", param="n")
    for field in ("max_tokens", "max_completion_tokens"):
        limit = body.get(field)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidRequest(f"{field} = {limit!r} must be a whole number of at least 1", param=field)
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and body.get("stream")):
        raise InvalidRequest("stream_options is an object that goes with stream = true alone", param="stream_options")
    return n


def wants_usage(body: Json) -> bool:
    """Whether a stream is to end with a chunk that has its usage and no choices."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def with_usage_rule(chunk: Json, body: Json) -> Json:
    """A chunk before the last: its usage is null where the last one has it, unless asked for in every chunk."""
    if not (body.get("stream_options") or {}).get("continuous_usage_stats"):
        chunk.pop("usage", None)
    return chunk | {"usage": chunk.get("usage")} if wants_usage(body) else chunk


def asked_of_engine(body: Json, version: int | None, adapter: Adapter | None = None) -> Json:
    """The body for the engine: with token ids always, since a span has to know how many tokens there are."""
    return {**body, "cache_salt": versioned_salt(body, version, adapter), "return_token_ids": True}


def versioned_salt(body: Json, version: int | None, adapter: Adapter | None = None) -> str:
    """Prefix KV is shared among prompts of one weight version only: KV of other weights would be a silent mixture.

    One that is sent under an update (`version` None) shares none: the next such one may be read by other weights. An
    adapter's name does not tell two loads of it apart, and that with its path is all that vLLM 0.32 goes by.
    """
    loaded = f"a{adapter.load_id}" if adapter else ""
    held = uuid4().hex if version is None else version
    return f"{body.get('cache_salt') or ''}v{held}{loaded}"


def check_replica(body: Json, replica: Replica) -> None:
    """Refuse what this replica's server cannot give."""
    if body.get("return_token_ids") and not replica.info.speaks_vllm:
        raise InvalidRequest(
            f"return_token_ids is set, but replica {replica.replica_id} is the server at {replica.info.url}, which is "
            "no vLLM and gives none",
            param="return_token_ids",
        )


def _prompt_list(body: Json) -> list[Any]:
    """Every accepted form of `prompt` as a list of prompts, each a string or a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            f"prompt is {'an empty list' if prompt == [] else type(prompt).__name__}: send text, token ids, or a list "
            "of either",
            param="prompt",
        )
    return [prompt] if isinstance(prompt[0], int) else prompt


def _checked_length(index: int, value: Any, max_len: int | None) -> int:
    """Length in tokens; an estimate for text, which only an engine can tokenise."""
    if not isinstance(value, str | list):
        raise InvalidRequest(f"prompt[{index}] is a {type(value).__name__}, not text or token ids", param="prompt")
    if not value:
        raise InvalidRequest(f"prompt[{index}] is empty: an engine needs at least one token", param="prompt")
    if isinstance(value, str):
        return math.ceil(len(value) / _CHARACTERS_PER_TOKEN)
    if max_len is not None and len(value) >= max_len:
        raise InvalidRequest(
            f"prompt[{index}] has {len(value)} tokens, which leaves none of max_model_len = {max_len} for a "
            "completion: shorten it, or serve with a larger engine.max_model_len",
            param="prompt",
        )
    return len(value)


def _rest_of(prompt: Prompt, choice: Json, index: int | None = None) -> Prompt:
    """What is still to be made of a choice that was cut off. `index` is its own among those of the request."""
    limit = prompt.body.get("max_tokens") or prompt.body.get("max_completion_tokens") or _DEFAULT_MAX_TOKENS
    read: list[int] = choice["prompt_token_ids"]
    kept = len(read) - len(prompt.body["prompt"]) if prompt.made else 0
    body = rest_body(prompt.body | {"max_tokens": limit, "return_token_ids": True}, read, kept)
    rollout = replace(prompt.rollout, n=1, tokens=len(read) + limit - kept, goes_on=True)
    index = prompt.index if index is None else index
    made, has_text = tuple(choice["token_ids"]), bool(choice.get("text"))
    return replace(prompt, index=index, rollout=rollout, body=body, made=made, has_text=has_text)


def _read(answer: Json) -> list[int] | None:
    return next((choice["prompt_token_ids"] for choice in answer["choices"] if choice.get("prompt_token_ids")), None)


def _hide_ids(choice: Json, body: Json) -> None:
    """Token ids are for those who asked; here they are always needed."""
    if not body.get("return_token_ids"):
        choice |= {"token_ids": None, "prompt_token_ids": None}


async def _detokenized(replica: Replica, model: str | None, token_ids: list[int]) -> str:
    asked = {"tokens": token_ids} | ({} if model is None else {"model": model})  # SGLang refuses null
    return str((await replica.engine.ask("POST", "/detokenize", asked, _ASK_TIMEOUT_S))["prompt"])


def _naming_prompt(error: EngineRefused, index: int) -> EngineRefused:
    """The engine's own error with the prompt it is about."""
    body = error.body
    if isinstance(inner := body.get("error"), dict):
        body = {**body, "error": {**inner, "message": f"prompt[{index}]: {inner.get('message', '')}"}}
    return EngineRefused(str(error), status=error.status, body=body, replica_id=error.replica_id)


def _assemble(replies: Sequence[Json], prompts: Sequence[Prompt]) -> Json:
    """One reply, prompt-major: prompt i's samples stand at i*n and after."""
    choices, usage = [], Usage()
    for answer, prompt in zip(replies, prompts, strict=True):
        usage.add_chunk(prompt.index, answer.get("usage"))
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            choice["index"] += prompt.index * prompt.rollout.n
            choices.append(choice)
    whole = {"id": f"cmpl-{prompts[0].request_id}", "created": int(time.time()), "choices": choices}
    return {**replies[0], **whole, "usage": usage.total()}
