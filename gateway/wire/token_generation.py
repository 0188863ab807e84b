"""/inference/v1/generate of vLLM's dialect: token ids of one prompt in, token ids out, with the weights that made them.

An engine that serves the route is asked in its own words, any other in those of /v1/completions, as far as these go.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownRoute
from gateway.config import GatewayConfig
from gateway.fleet import Fleet
from gateway.flight import Flight
from gateway.replica import Replica
from gateway.routing import Rollout
from gateway.scheduler import Scheduler
from gateway.wire import completions
from gateway.wire.completions import check_sampling, name_adapter, stamp_versions, tell_kv, versioned_salt
from gateway.wire.freshness import read_freshness, without_freshness
from gateway.wire.resumption import begun_or_anew, refuse_cut_off
from gateway.wire.spans import StreamSpans
from gateway.wire.token_words import completion_body, token_chunk, token_reply

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
        async def call(replica: Replica) -> Json:
            flight, timeout_s = replica.take_off(), self._config.generate_timeout_s
            asked = self._asked_of(replica, rollout, body)
            if _serves(replica):
                answer = await replica.engine.generate(PATH, asked, timeout_s)
            else:
                completed = completion_body(asked, replica.info)
                answer = token_reply(await replica.engine.generate(completions.PATH, completed, timeout_s), asked)
            refuse_cut_off(answer, replica)
            stamp_versions(answer, flight, await replica.vouched(), rollout.adapter)
            return answer

        return await self._scheduler.run(rollout, call)

    async def stream(self, rollout: Rollout, body: Json, usage: completions.Usage) -> AsyncGenerator[Json]:
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

        spans, tokens = StreamSpans(), 0
        async for replica, chunk in self._scheduler.stream(rollout, call):
            for choice in chunk["choices"]:
                choice["weight_version"] = replica.weight_version
                spans.stamp(choice, found := len(choice["token_ids"] or ()))
                tell_kv(choice, flight)
                tokens += found
                name_adapter(choice, rollout.adapter)
            usage.add_chunk(0, {"prompt_tokens": len(body["token_ids"]), "completion_tokens": tokens})
            yield chunk

    async def abort(self, request_ids: Any) -> None:
        """End requests, which are answered with the tokens they have. Ids that nobody knows any more are passed over.

        Raises `UnknownRoute` where no engine can do it.
        """
        if not isinstance(request_ids, list) or not all(isinstance(one, str) and one for one in request_ids):
            raise InvalidRequest(f"request_ids = {request_ids!r} must be a list of ids", param="request_ids")
        replicas = [replica for replica in self._fleet.alive if ABORT_PATH in replica.info.capabilities]
        if not replicas:
            raise lacking(ABORT_PATH, self._fleet.alive)
        ids = [_ID_PREFIX + one.removeprefix(_ID_PREFIX) for one in request_ids]
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
