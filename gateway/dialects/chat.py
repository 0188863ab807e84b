"""/v1/chat/completions of vLLM's dialect: one conversation is one rollout."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.config.schema import GatewayConfig
from gateway.dialects.completions import (
    Usage,
    asked_of_engine,
    check_replica,
    check_sampling,
    versioned_salt,
    wants_usage,
    with_usage_rule,
)
from gateway.dialects.freshness import read_freshness, without_freshness
from gateway.dialects.merged import merged
from gateway.dialects.resumption.chat import ChatRests
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.tokens import begun_or_anew, mark_cut_off, places_cut_off, refuse_half_called
from gateway.dialects.resumption.told_chat import ToldChat
from gateway.dialects.spans import stamp_versions
from gateway.dialects.token_generation import TokenGeneration
from gateway.fleet.fleet import Fleet
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout
from gateway.fleet.scheduler import Scheduler, using

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
            await replica.vouched()
            stamp_versions(answer, flight, rollout.adapter)
            return answer

        return await self._scheduler.run(rollout, call)

    async def stream(self, rollout: Rollout, body: Json, usage: Usage) -> AsyncGenerator[Json]:
        """Chunks as they come; `usage` is counted up, whether or not the client asks for it."""
        body, last = without_freshness(body), Json()
        with using(rollout):
            async with aclosing(self._stream_all(rollout, body, usage)) as chunks:
                async for chunk in chunks:
                    if chunk["choices"]:
                        yield with_usage_rule(chunk, body)
                    else:
                        last = chunk
        if last and wants_usage(body):
            yield last

    async def _stream_all(self, rollout: Rollout, body: Json, usage: Usage) -> AsyncGenerator[Json]:
        shows_all = body.get("include_reasoning") is not False  # vLLM tells no ids otherwise
        resumes = shows_all and self._rests.resumes(rollout, body)
        has_ids = resumes or (shows_all and bool(body.get("return_token_ids")))
        cut, told = CutStream(range(rollout.n), rollout.adapter, resumes=resumes, has_ids=has_ids), ToldChat()
        chunk, counted = Json(), Json()
        async with aclosing(self._stream_first(rollout, body, cut, told, resumes=resumes)) as chunks:
            async for chunk in chunks:
                counted = chunk.get("usage") or counted
                usage.add_chunk(0, counted)
                yield chunk
        if not (made := cut.cut_off()):
            return
        tokens, envelope = 0, {key: chunk.get(key) for key in ("id", "object", "created", "model")}
        opened = await self._rests.opened(rollout, body, made, told)
        for choice in told.kept if opened is None else opened.told:
            if _tells(choice, body):
                yield envelope | {"choices": [_shown(choice, body)]}
        if opened is None:
            for choice in cut.ends():
                yield envelope | {"choices": [choice | {"delta": {}}]}
            return
        rests = [self._rests.stream(rollout, body, opened, index) for index in made]
        async with aclosing(merged(rests)) as rest:
            async for choice in rest:
                tokens += len(choice["token_ids"] or ())
                cut.follow(choice)
                usage.add_chunk(0, cut.usage(counted, {"completion_tokens": tokens}))
                if not _tells(choice, body):
                    continue
                yield envelope | {"choices": [_shown(choice, body)], "usage": usage.total()}
        yield envelope | {"choices": [], "usage": usage.total()}

    async def _stream_first(
        self, rollout: Rollout, body: Json, cut: CutStream, told: ToldChat, *, resumes: bool
    ) -> AsyncGenerator[Json]:
        """The chunks before the one that an update cuts them off with. What may go on needs its token ids."""
        options = {**(body.get("stream_options") or {}), "include_usage": True}
        ids = {"return_token_ids": True} if resumes else {}
        flight: Flight

        def call(replica: Replica) -> AsyncGenerator[Json]:
            nonlocal flight
            check_replica(body, replica)
            flight = replica.take_off()
            salt = versioned_salt(body, replica.weight_version, rollout.adapter)
            asked = {**body, "cache_salt": salt, "stream_options": options, **ids}
            return begun_or_anew(replica.engine.stream(PATH, asked, self._config.generate_timeout_s), replica)

        async with aclosing(self._scheduler.stream(rollout, call)) as placed:
            async for replica, chunk in placed:
                cut.told_prompt(chunk.get("prompt_token_ids"))
                if not body.get("return_token_ids") and "prompt_token_ids" in chunk:
                    chunk["prompt_token_ids"] = None
                shown = []
                for choice in chunk["choices"]:
                    if cut.see(choice, replica, flight):
                        told.keep(choice)
                        continue
                    told.see(choice)
                    if _tells(choice, body):
                        shown.append(_shown(choice, body))
                if chunk["choices"] and not shown:
                    continue
                chunk["choices"] = shown
                yield chunk


def _tells(choice: Json, body: Json) -> bool:
    """Whether a client hears anything of a choice: vLLM sends ids also of what its parsers hold back."""
    fields = ("delta", "finish_reason", "logprobs") + (("token_ids",) if body.get("return_token_ids") else ())
    return any(choice.get(field) for field in fields)


def _shown(choice: Json, body: Json) -> Json:
    """Token ids are for those who asked; here they may be needed."""
    return choice if body.get("return_token_ids") or "token_ids" not in choice else choice | {"token_ids": None}
