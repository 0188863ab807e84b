"""/v1/chat/completions of vLLM's dialect: one conversation is one rollout."""

from collections.abc import AsyncGenerator

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.config import GatewayConfig
from gateway.fleet import Fleet
from gateway.flight import Flight
from gateway.replica import Replica
from gateway.routing import Rollout
from gateway.scheduler import Scheduler, using
from gateway.wire.chat_rests import ChatRests
from gateway.wire.completions import (
    Usage,
    asked_of_engine,
    check_replica,
    check_sampling,
    versioned_salt,
    wants_usage,
    with_usage_rule,
)
from gateway.wire.freshness import read_freshness, without_freshness
from gateway.wire.resumption import begun_or_anew, mark_cut_off, places_cut_off, refuse_half_called
from gateway.wire.spans import name_adapter, number_versions, stamp_versions, tell_kv
from gateway.wire.token_generation import TokenGeneration

PATH = "/v1/chat/completions"

# Load of a conversation that names no limit; an engine would let it fill the context.
_DEFAULT_MAX_TOKENS = 1024
_CHARACTERS_PER_TOKEN = 4


class Chat:
    """Decodes a conversation and has one replica continue it."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, scheduler: Scheduler, tokens: TokenGeneration) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._rests = ChatRests(fleet, tokens)

    def decode(self, body: Json, request_id: str, session: str = "") -> Rollout:
        model, adapter = self._fleet.asked(body.get("model"))
        n = check_sampling(body, self._config.max_n)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message", param="messages")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS
        characters = sum(len(str(message)) for message in messages)
        tokens = characters // _CHARACTERS_PER_TOKEN + n * limit
        fresh = read_freshness(body, self._fleet, model)
        return Rollout(
            request_id=request_id,
            model=model,
            n=n,
            tokens=tokens,
            min_version=fresh.min_version,
            max_staleness=fresh.max_staleness,
            session=session,
            adapter=adapter,
        )

    async def generate(self, rollout: Rollout, body: Json) -> Json:
        body = without_freshness(body)
        with using(rollout):  # also between what was cut off and its rest
            answer = None
            while answer is None:
                first = await self._generate_first(rollout, body)
                answer = await self._rests.gone_on(rollout, body, first) if places_cut_off(first) else first
        if not body.get("return_token_ids"):
            for choice in answer["choices"]:
                choice["token_ids"] = None
            answer["prompt_token_ids"] = None
        return answer

    async def _generate_first(self, rollout: Rollout, body: Json) -> Json:
        """The reply up to where an update cuts it off."""

        async def call(replica: Replica) -> Json:
            check_replica(body, replica)
            flight = replica.take_off()
            asked = asked_of_engine(body, flight.began, rollout.adapter)
            answer = await replica.engine.generate(PATH, asked, self._config.generate_timeout_s)
            refuse_half_called(answer, replica)
            read = answer.get("prompt_token_ids")
            mark_cut_off(answer, replica, read, resumes=self._rests.resumes(rollout, body))
            stamp_versions(answer, flight, await replica.vouched(), rollout.adapter)
            return answer

        return await self._scheduler.run(rollout, call)

    async def stream(self, rollout: Rollout, body: Json, usage: Usage) -> AsyncGenerator[Json]:
        """Chunks as they come; `usage` is counted up, whether or not the client asks for it."""
        body = without_freshness(body)
        options = {**(body.get("stream_options") or {}), "include_usage": True}

        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            check_replica(body, replica)
            flight = replica.take_off()
            salt = versioned_salt(body, replica.weight_version, rollout.adapter)
            salted = {**body, "cache_salt": salt, "stream_options": options}
            return begun_or_anew(replica.engine.stream(PATH, salted, self._config.generate_timeout_s), replica)

        async for replica, chunk in self._scheduler.stream(rollout, call):
            for choice in chunk["choices"]:
                choice["weight_version"] = replica.weight_version
                number_versions(choice)
                tell_kv(choice, flight)
                name_adapter(choice, rollout.adapter)
            usage.add_chunk(0, chunk.get("usage"))
            if chunk["choices"]:
                yield with_usage_rule(chunk, body)
            elif wants_usage(body):
                yield chunk
