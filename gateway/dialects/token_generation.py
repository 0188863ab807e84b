"""/inference/v1/generate of vLLM's dialect: token ids of one prompt in, token ids out, with the weights that made them.

An engine that serves the route is asked in its own words, any other in those of /v1/completions, as far as these go.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownRoute
from gateway.config.schema import GatewayConfig
from gateway.dialects import completions
from gateway.dialects.completions import check_sampling, versioned_salt
from gateway.dialects.freshness import read_freshness, without_freshness
from gateway.dialects.merged import merged
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import (
    begun_or_anew,
    joined_tokens,
    mark_cut_off,
    may_resume,
    places_cut_off,
    rest_sampling,
    usage_of_whole,
)
from gateway.dialects.spans import stamp_versions
from gateway.dialects.token_words import completion_body, token_chunk, token_reply
from gateway.fleet.fleet import Fleet
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout
from gateway.fleet.scheduler import Scheduler, using

PATH = "/inference/v1/generate"
ABORT_PATH = "/inference/v1/abort_requests"

# vLLM puts this before the id of a request, also in its reply.
_ID_PREFIX = "generate-tokens-"

# Tensors and media are not read from requests; the others tie a request to one engine.
_REFUSED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
# Load of a prompt that names no limit; the engine lets it fill the context.
_DEFAULT_MAX_TOKENS = 1024
_ABORT_TIMEOUT_S = 10.0


class TokenGeneration:
    """Decodes a prompt of token ids and has one replica complete it."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._rest_ids: dict[str, list[str]] = {}

    def decode(self, body: Json, request_id: str, session: str = "") -> Rollout:
        """Raises `InvalidRequest` for what no engine would take, `UnknownRoute` where none knows token ids."""
        model, adapter = self._fleet.asked(body.get("model"))
        for field in _REFUSED:
            if body.get(field):
                raise InvalidRequest(f"{field} is refused here: send token_ids and sampling_params alone", param=field)
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict):
            raise InvalidRequest(
                f"sampling_params is {type(sampling).__name__}: send an object, such as {{'max_tokens': 16}}",
                param="sampling_params",
            )
        asked = {"stream": body.get("stream"), "stream_options": body.get("stream_options")}
        n = check_sampling(sampling | asked, self._config.max_n)
        length = _checked_length(body.get("token_ids"), self._room(model))
        fresh = read_freshness(body, self._fleet, model)
        return Rollout(
            request_id=_checked_id(body.get("request_id")) or request_id,
            model=model,
            n=n,
            tokens=length + n * (sampling.get("max_tokens") or _DEFAULT_MAX_TOKENS),
            min_version=fresh.min_version,
            max_staleness=fresh.max_staleness,
            session=session,
            adapter=adapter,
        )

    async def generate(self, rollout: Rollout, body: Json) -> Json:
        with using(rollout):  # also between what was cut off and its rest
            answer = await self._generate_first(rollout, body)
            return await self._gone_on(rollout, body, answer)

    async def _generate_first(self, rollout: Rollout, body: Json) -> Json:
        """The reply up to where an update cuts it off."""

        async def call(replica: Replica) -> Json:
            flight, timeout_s = replica.take_off(), self._config.generate_timeout_s
            asked = self._asked_of(replica, rollout, body)
            if _serves(replica):
                answer = await replica.engine.generate(PATH, asked, timeout_s)
            else:
                completed = completion_body(asked, replica.info)
                answer = token_reply(await replica.engine.generate(completions.PATH, completed, timeout_s), asked)
            mark_cut_off(answer, replica, body["token_ids"], resumes=_resumes(body))
            await replica.vouched()
            stamp_versions(answer, flight, rollout.adapter)
            return answer

        return await self._scheduler.run(rollout, call)

    async def _gone_on(self, rollout: Rollout, body: Json, answer: Json) -> Json:
        """The reply with the rest of those choices that an update has cut off."""
        cut = places_cut_off(answer)
        if not cut:
            return answer
        choices = list(answer["choices"])
        with self._rests_of(rollout, [choices[place]["index"] for place in cut]) as rollouts:
            try:
                async with asyncio.TaskGroup() as group:
                    rests = {
                        place: group.create_task(self.generate(*rest_of(one, body, choices[place])))
                        for place, one in zip(cut, rollouts, strict=True)
                    }
            except* Exception as errors:
                raise errors.exceptions[0] from None
        for place, rest in rests.items():
            choices[place] = joined_tokens(choices[place], rest.result()["choices"][0])
        return {**answer, "choices": choices, "usage": usage_of_whole(answer, choices)}

    async def stream(self, rollout: Rollout, body: Json, usage: completions.Usage) -> AsyncGenerator[Json]:
        """Chunks as they come; `usage` is counted up, whether or not the client asks for it."""
        cut = CutStream(range(rollout.n), rollout.adapter, resumes=_resumes(body), read=body["token_ids"])
        tokens, last = 0, Json()
        with using(rollout):
            async with aclosing(self._stream_all(rollout, body, cut)) as chunks:
                async for chunk in chunks:
                    tokens += sum(len(choice["token_ids"] or ()) for choice in chunk["choices"])
                    usage.add_chunk(0, {"prompt_tokens": len(body["token_ids"]), "completion_tokens": tokens})
                    if cut.is_cut and chunk.get("usage"):
                        chunk["usage"] |= usage.total()
                    if chunk["choices"]:
                        yield chunk
                    else:  # its usage alone: the last chunk of a stream, or of what has gone on
                        last = chunk
        if last:
            yield last

    async def _stream_all(self, rollout: Rollout, body: Json, cut: CutStream) -> AsyncGenerator[Json]:
        chunk = Json()
        async with aclosing(self._stream_first(rollout, body, cut)) as chunks:
            async for chunk in chunks:
                yield chunk
        made = cut.cut_off()
        with self._rests_of(rollout, list(made)) as rollouts:
            rests = [
                self._stream_rest(rest_of(one, body, made[index]), index, cut)
                for index, one in zip(made, rollouts, strict=True)
            ]
            async with aclosing(merged(rests)) as chunks:
                async for rest in chunks:
                    yield rest | {"request_id": chunk["request_id"]}

    async def _stream_first(self, rollout: Rollout, body: Json, cut: CutStream) -> AsyncGenerator[Json]:
        """The chunks up to where an update cuts them off."""
        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            flight = replica.take_off()
            asked = self._asked_of(replica, rollout, body)
            if _serves(replica):
                chunks = replica.engine.stream(PATH, asked, self._config.generate_timeout_s)
            else:
                chunks = self._translated(replica, asked)
            return begun_or_anew(chunks, replica)

        async with aclosing(self._scheduler.stream(rollout, call)) as placed:
            async for replica, chunk in placed:
                for choice in chunk["choices"]:
                    cut.see(choice, replica, flight)
                yield chunk

    async def _stream_rest(self, rest: tuple[Rollout, Json], index: int, cut: CutStream) -> AsyncGenerator[Json]:
        async with aclosing(self.stream(*rest, completions.Usage())) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    choice["index"] = index
                    cut.follow(choice)
                yield chunk

    @contextmanager
    def _rests_of(self, rollout: Rollout, indexes: Sequence[int]) -> Iterator[list[Rollout]]:
        """The rollouts of what is still to be made of these samples, which can be aborted by the id of the whole."""
        if rollout.n == 1:
            yield [replace(rollout, goes_on=True) for _ in indexes]
            return
        names = [f"{rollout.request_id}-{index}" for index in indexes]
        self._rest_ids[rollout.request_id] = names
        try:
            yield [replace(rollout, request_id=name, n=1, goes_on=True) for name in names]
        finally:
            self._rest_ids.pop(rollout.request_id, None)

    async def abort(self, request_ids: Any) -> None:
        """End requests, which are answered with the tokens they have. Ids that nobody knows any more are passed over.

        Raises `UnknownRoute` where no engine can do it.
        """
        if not isinstance(request_ids, list) or not all(isinstance(one, str) and one for one in request_ids):
            raise InvalidRequest(f"request_ids = {request_ids!r} must be a list of ids", param="request_ids")
        replicas = [replica for replica in self._fleet.alive if ABORT_PATH in replica.info.capabilities]
        if not replicas:
            raise lacking(ABORT_PATH, self._fleet.alive)
        named = [one.removeprefix(_ID_PREFIX) for one in request_ids]
        ids = [_ID_PREFIX + part for one in named for part in (one, *self._rest_ids.get(one, ()))]
        await asyncio.gather(
            *(replica.engine.ask("POST", ABORT_PATH, {"request_ids": ids}, _ABORT_TIMEOUT_S) for replica in replicas)
        )

    async def _translated(self, replica: Replica, asked: Json) -> AsyncGenerator[Json]:
        chunks = replica.engine.stream(
            completions.PATH, completion_body(asked, replica.info), self._config.generate_timeout_s
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield token_chunk(chunk, asked)

    def _asked_of(self, replica: Replica, rollout: Rollout, body: Json) -> Json:
        if not replica.info.speaks_vllm:
            raise UnknownRoute(
                f"{PATH}: replica {replica.replica_id} runs {replica.info.engine_version} at {replica.info.url}, which "
                "knows no token ids; send text to /v1/completions, or serve the model with vLLM or SGLang",
            )
        salt = versioned_salt(body, replica.weight_version, rollout.adapter)
        return without_freshness(body) | {"request_id": rollout.request_id, "cache_salt": salt}

    def _room(self, model: str) -> int | None:
        lengths = [replica.info.max_model_len for replica in self._fleet.alive if replica.info.model == model]
        return min((length for length in lengths if length is not None), default=None)


def _resumes(body: Json) -> bool:
    """Whether its completions may go on from their tokens: their text could not be told as if it were made at once."""
    return (body.get("output_mode") or "tokens") == "tokens" and may_resume(body["sampling_params"])


def rest_of(rollout: Rollout, body: Json, choice: Json) -> tuple[Rollout, Json]:
    """What is still to be made of a choice that was cut off: it reads its own tokens after the prompt's."""
    made = choice["token_ids"] or []
    read, sampling = [*body["token_ids"], *made], rest_sampling(body["sampling_params"], len(made))
    rest = {**body, "token_ids": read, "sampling_params": sampling, "return_token_ids": None}
    return replace(rollout, tokens=len(read) + (sampling.get("max_tokens") or _DEFAULT_MAX_TOKENS)), rest


def lacking(path: str, replicas: Iterable[Replica]) -> UnknownRoute:
    """No engine serves `path`: which ones there are, and what would."""
    there = ", ".join(f"{one.replica_id} {one.info.kind} {one.info.engine_version}" for one in replicas) or "no replica"
    return UnknownRoute(f"{path} is served by vLLM from 0.30 on (--enable-scale-out), and by none of these: {there}")


def _serves(replica: Replica) -> bool:
    return PATH in replica.info.capabilities


def _checked_id(request_id: Any) -> str | None:
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequest(f"request_id = {request_id!r} must be text", param="request_id")
    return request_id


def _checked_length(token_ids: Any, max_len: int | None) -> int:
    if not isinstance(token_ids, list) or not token_ids or any(type(token_id) is not int for token_id in token_ids):
        raise InvalidRequest("token_ids must be a list of at least one token id", param="token_ids")
    if max_len is not None and len(token_ids) >= max_len:
        raise InvalidRequest(
            f"token_ids has {len(token_ids)} tokens, which leaves none of max_model_len = {max_len} for a completion: "
            "shorten it, or serve with a larger engine.max_model_len",
            param="token_ids",
        )
    return len(token_ids)
