"""/inference/v1/generate of vLLM's dialect: token ids of one prompt in, token ids out, with their weight versions.

An engine that serves the route gets the body as it is; any other engine gets it in the words of /v1/completions.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownRoute, shown
from gateway.config.schema import GatewayConfig
from gateway.dialects import completion_prompt
from gateway.dialects.completions import common_room
from gateway.dialects.expected import read_expected, without_own_fields
from gateway.dialects.freshness import read_freshness
from gateway.dialects.parallel import merged
from gateway.dialects.replies.assembly import Assembly, is_read_in_chunks
from gateway.dialects.replies.carried import encoded, opened
from gateway.dialects.replies.chunks import read_chunks
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.features import inexact_fields, marked
from gateway.dialects.resumption.tokens import joined_tokens, rest_sampling
from gateway.dialects.runner import Exchange, Part, Runner
from gateway.dialects.sampling import check_id, check_sampling, normalise_numbers, versioned_salt
from gateway.dialects.usage import Usage, usage_of_joined, wants_usage
from gateway.dialects.words.tokens import completion_body, token_chunk, token_reply
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempt_loop import using
from gateway.fleet.placement.client_names import name_of_client
from gateway.fleet.placement.lengths import prompt_key
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from gateway.fleet.together import together

log = structlog.get_logger()

PATH = "/inference/v1/generate"
ABORT_PATH = "/inference/v1/abort_requests"

# vLLM puts this before the id of a request, also in its reply.
_ID_PREFIX = "generate-tokens-"

_REFUSED = ("kv_transfer_params", "ec_transfer_params")  # they tie a request to one engine
_MEDIA = ("features", "content_parts")  # images and sound as vLLM's route has them
# Load of a prompt that names no limit; the engine lets it fill the context.
_DEFAULT_MAX_TOKENS = 1024
_ABORT_TIMEOUT_S = 10.0


class TokenGeneration:
    """Decodes a prompt of token ids and has replicas complete it."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, runner: Runner) -> None:
        self._config = config
        self._fleet = fleet
        self._runner = runner
        self._rest_ids: dict[str, list[str]] = {}

    def decode(self, body: Json, request_id: str, session: str = "", client: str = "") -> Rollout:
        """Give the body its request's id where it has none. Raises `InvalidRequest` for fields that no engine would
        take."""
        model, adapter = self._fleet.asked(body.get("model") or None)
        for field in _REFUSED:
            if body.get(field):
                raise InvalidRequest(f"{field} is refused here: it ties a request to one engine", param=field)
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict):
            raise InvalidRequest(
                f"sampling_params is {type(sampling).__name__}: send an object, such as {{'max_tokens': 16}}",
                param="sampling_params",
            )
        normalise_numbers(sampling)
        asked = {"stream": body.get("stream"), "stream_options": body.get("stream_options")}
        n = check_sampling(sampling | asked)
        length = _checked_length(body.get("token_ids"), common_room(self._fleet, model))
        fresh = read_freshness(body, self._fleet, model)
        key, limit = prompt_key(body["token_ids"]), sampling.get("max_tokens") or _DEFAULT_MAX_TOKENS
        expected = read_expected(body)[0] or self._runner.expected(model, key)
        body["request_id"] = _checked_id(body.get("request_id")) or request_id
        return Rollout(
            request_id=name_of_client(client, body["request_id"]),  # engines abort by it
            model=model,
            n=n,
            prompt_tokens=length,
            needs_ids=True,
            needs_route=PATH if _media_of(body) else "",
            tokens=length + n * min(limit, math.ceil(expected or limit)),
            min_version=fresh.min_version,
            max_staleness=fresh.max_staleness,
            session=session,
            adapter=adapter,
            expected=expected,
            prompt_key=key,
        )

    def room_after(self, rollout: Rollout, body: Json) -> int | None:
        """The tokens that a sample may have after its prompt; None where no limit is known."""
        room = common_room(self._fleet, rollout.model)
        limits = (body["sampling_params"].get("max_tokens"), None if room is None else room - len(body["token_ids"]))
        return min((max(0, limit) for limit in limits if limit is not None), default=None)

    async def generate(self, rollout: Rollout, body: Json) -> Json:
        reply = await self._runner.generate(_TokenPrompt(self, self._config, rollout, body))
        return _as_asked(reply, rollout, body)

    async def stream(self, rollout: Rollout, body: Json, usage: Usage) -> AsyncGenerator[Json]:
        """Chunks in the order of arrival; counts up `usage`, whether or not the client asks for it."""
        prompt = _TokenPrompt(self, self._config, rollout, body)
        cut = CutStream(range(rollout.n), rollout.adapter, inexact=prompt.inexact, read=body["token_ids"])
        tokens, chunk, last = 0, Json(), Json()
        with using(rollout):
            async with aclosing(self._stream_all(prompt, cut)) as chunks:
                async for chunk in chunks:
                    tokens += sum(len(choice["token_ids"] or ()) for choice in chunk["choices"])
                    usage.add_chunk(0, {"prompt_tokens": len(body["token_ids"]), "completion_tokens": tokens})
                    if cut.is_cut and chunk.get("usage"):
                        chunk["usage"] |= usage.total()
                    chunk = _as_asked(chunk, rollout, body)
                    if chunk["choices"]:
                        yield chunk
                    else:  # its usage alone: the last chunk of a stream, or of a rest
                        last = chunk
        if not last and cut.is_cut and wants_usage(body):  # a replica died before it
            last = chunk | {"choices": [], "usage": usage.total()}
        if last:
            yield last

    async def _stream_all(self, prompt: "_TokenPrompt", cut: CutStream) -> AsyncGenerator[Json]:
        chunk = Json()
        async with aclosing(self._runner.stream(prompt, cut)) as chunks:
            async for chunk in chunks:
                yield chunk
        made = cut.cut_off()
        self._runner.count_kept(len(part["token_ids"]) for part in made.values())
        with self.rests_of(prompt.rollout, list(made)) as rollouts:
            rests = [
                self._stream_rest(rest_of(rollout, prompt.body, made[index], index), index, cut)
                for index, rollout in zip(made, rollouts, strict=True)
            ]
            async with aclosing(merged(rests)) as chunks:
                async for rest in chunks:
                    yield rest | {"request_id": chunk["request_id"]}

    async def _stream_rest(self, rest: tuple[Rollout, Json], index: int, cut: CutStream) -> AsyncGenerator[Json]:
        async with aclosing(self.stream(*rest, Usage())) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    choice["index"] = index
                    cut.follow(choice)
                yield chunk

    @contextmanager
    def rests_of(self, rollout: Rollout, indexes: Sequence[int]) -> Iterator[list[Rollout]]:
        """Rollouts that continue these samples; an abort of the whole rollout's id reaches them."""
        if rollout.n == 1:
            yield [replace(rollout, goes_on=True, attempts=rollout.attempts.branch()) for _ in indexes]
            return
        names = [f"{rollout.request_id}-{index}" for index in indexes]
        self._rest_ids[rollout.request_id] = names
        try:
            attempts = rollout.attempts
            yield [replace(rollout, request_id=name, n=1, goes_on=True, attempts=attempts.branch()) for name in names]
        finally:
            self._rest_ids.pop(rollout.request_id, None)

    async def abort(self, request_ids: Any, clients_of: Callable[[str], Iterable[str]]) -> None:
        """End requests, which are answered with the tokens they have; `clients_of` are the clients whose request of an
        id the caller may end. Other ids, and those of submissions, which belong to their keys, are ignored.

        Raises `UnknownRoute` where no engine serves the route.
        """
        if not isinstance(request_ids, list) or not all(isinstance(item, str) and item for item in request_ids):
            raise InvalidRequest(f"request_ids = {shown(request_ids)} must be a list of ids", param="request_ids")
        replicas = [replica for replica in self._fleet.replicas if ABORT_PATH in replica.info.capabilities]
        if not replicas:
            raise lacking(ABORT_PATH, self._fleet.replicas)
        names = {check_id(item.removeprefix(_ID_PREFIX), "request_ids") for item in request_ids}
        named = [name_of_client(client, name) for name in names for client in clients_of(name)]
        if not named:
            return
        ids = {part for name in named for part in (name, *self._rest_ids.get(name, ()))}
        self._runner.withdraw(lambda rollout: rollout.request_id in ids and not rollout.owner)
        body = {"request_ids": [_ID_PREFIX + part for part in ids]}
        results = await asyncio.gather(
            *(replica.engine.ask("POST", ABORT_PATH, body, _ABORT_TIMEOUT_S) for replica in replicas),
            return_exceptions=True,  # a SUSPECT replica may not answer, and the others have aborted
        )
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, BaseException):
                log.warning("an abort did not reach a replica", replica=replica.replica_id, error=str(result))


@dataclass(frozen=True)
class _TokenPrompt(Exchange):
    """One prompt of token ids as its body asks for it."""

    tokens: TokenGeneration
    config: GatewayConfig
    rollout: Rollout
    body: Json

    @property
    def inexact(self) -> tuple[str, ...] | None:
        """None with media, which one engine may have cached, and with text output: its text could not be joined as if
        it were made at once."""
        is_plain = (self.body.get("output_mode") or "tokens") == "tokens" and not _media_of(self.body)
        return inexact_fields(self.body["sampling_params"]) if is_plain else None

    @property
    def is_full(self) -> bool:
        return self.rollout.goes_on and self.tokens.room_after(self.rollout, self.body) == 0

    def prompt_ids(self, answer: Json) -> list[int]:
        return list(self.body["token_ids"])

    async def ask(self, replica: Replica, part: Part) -> Json:
        body, timeout_s = self._engine_body(replica), self.config.generate_timeout_s
        sampling = body["sampling_params"]
        limit = sampling.get("max_tokens") or _DEFAULT_MAX_TOKENS
        if self.resumes and is_read_in_chunks(sampling, limit, self.rollout, replica.info):
            usage = {"stream_options": {"include_usage": True}}
            events = self._events(replica, body | usage)
            reply = await part.read(events, Assembly(self.rollout.n, replica.replica_id, has_text=False))
            return self._as_whole(opened(reply))
        if _serves(replica):
            return await replica.engine.generate(PATH, body, timeout_s)
        completed = completion_body(body, replica.info)
        return token_reply(await replica.engine.generate(completion_prompt.PATH, completed, timeout_s), body)

    def chunks(self, replica: Replica) -> AsyncGenerator[list[Json]]:
        return self._chunks(replica, self._engine_body(replica))

    def _chunks(self, replica: Replica, body: Json) -> AsyncGenerator[list[Json]]:
        if _serves(replica):
            return read_chunks(replica, PATH, body, self.rollout.n, self.config.generate_timeout_s)
        return self._translated(replica, body)

    async def _translated(self, replica: Replica, body: Json) -> AsyncGenerator[list[Json]]:
        asked = completion_body(body, replica.info)
        blocks = read_chunks(replica, completion_prompt.PATH, asked, self.rollout.n, self.config.generate_timeout_s)
        async with aclosing(blocks):
            async for chunks in blocks:
                yield [token_chunk(chunk, body) for chunk in chunks]

    def _events(self, replica: Replica, body: Json) -> AsyncGenerator[list[bytes]]:
        if _serves(replica):
            return replica.engine.events(PATH, body, self.config.generate_timeout_s)
        return self._encoded(replica, body)

    async def _encoded(self, replica: Replica, body: Json) -> AsyncGenerator[list[bytes]]:
        async with aclosing(self._translated(replica, body)) as blocks:
            async for chunks in blocks:
                yield [encoded(chunk) for chunk in chunks]

    def _as_whole(self, reply: Json) -> Json:
        """A reply that was read in chunks, with the fields that only whole replies have."""
        ids = list(self.body["token_ids"]) if self.body.get("return_token_ids") else None
        for choice in reply["choices"]:
            choice.pop("prompt_token_ids", None)
        return reply | {"prompt_logprobs": None, "prompt_token_ids": ids}

    def bare_reply(self) -> Json:
        return self.bare_chunk() | {"prompt_logprobs": None}

    def bare_chunk(self) -> Json:
        choices: list[Json] = [{"index": index, "token_ids": [], "logprobs": None} for index in range(self.rollout.n)]
        usage = usage_of_joined({"usage": {"prompt_tokens": len(self.body["token_ids"])}}, choices)
        head = {"request_id": self.rollout.request_id, "choices": choices, "prompt_token_ids": None}
        return head | {"usage": usage}

    async def continued(self, answer: Json, cut: list[int]) -> Json:
        choices = list(answer["choices"])
        with self.tokens.rests_of(self.rollout, [choices[place]["index"] for place in cut]) as rollouts:
            rests = await together(
                self.tokens.generate(*rest_of(rollout, self.body, choices[place], choices[place]["index"]))
                for place, rollout in zip(cut, rollouts, strict=True)
            )
        for place, rest in zip(cut, rests, strict=True):
            choices[place] = marked(joined_tokens(choices[place], rest["choices"][0]), self.inexact or ())
        return {**answer, "choices": choices, "usage": usage_of_joined(answer, choices)}

    def _engine_body(self, replica: Replica) -> Json:
        if not replica.info.speaks_vllm:
            raise UnknownRoute(
                f"{PATH}: replica {replica.replica_id} runs {replica.info.engine_version} at {replica.info.url}, which "
                "knows no token ids; send text to /v1/completions, or serve the model with vLLM or SGLang",
            )
        if (field := _media_of(self.body)) and not _serves(replica):
            raise InvalidRequest(
                f"{field} needs an engine with {PATH} (vLLM from 0.30 on, --enable-scale-out), and replica "
                f"{replica.replica_id} runs {replica.info.kind} {replica.info.engine_version}: send images to "
                "/v1/chat/completions",
                param=field,
            )
        salt = versioned_salt(self.body, replica.weight_version, self.rollout.adapter)
        return without_own_fields(self.body) | {"request_id": self.rollout.request_id, "cache_salt": salt}


def rest_of(rollout: Rollout, body: Json, choice: Json, index: int) -> tuple[Rollout, Json]:
    """The rollout and body that continue the choice of sample `index`: engines read its tokens after the prompt's."""
    made = choice["token_ids"] or []
    read, sampling = [*body["token_ids"], *made], rest_sampling(body["sampling_params"], made, index)
    rest = {**body, "token_ids": read, "sampling_params": sampling, "return_token_ids": None}
    return replace(rollout, tokens=len(read) + (sampling.get("max_tokens") or _DEFAULT_MAX_TOKENS)), rest


def lacking(path: str, replicas: Iterable[Replica]) -> UnknownRoute:
    """The error where no engine serves `path`; it names the engines that run and those that would serve it."""
    found = ", ".join(f"{one.replica_id} {one.info.kind} {one.info.engine_version}" for one in replicas) or "no replica"
    return UnknownRoute(f"{path} is served by vLLM from 0.30 on (--enable-scale-out), and by none of these: {found}")


def _media_of(body: Json) -> str:
    """The field of a body that has images or sound, or ""."""
    return next((field for field in _MEDIA if body.get(field)), "")


def _serves(replica: Replica) -> bool:
    return PATH in replica.info.capabilities


def _as_asked(reply: Json, rollout: Rollout, body: Json) -> Json:
    """A reply or chunk with the id that the client knows, and with versions as text, which vLLM's own routes read."""
    if name := body.get("request_id"):
        reply["request_id"] = str(reply.get("request_id") or name).replace(rollout.request_id, name)
    for choice in reply["choices"] if not rollout.goes_on else ():
        for span in choice.get("weight_versions") or ():
            span["version"] = str(span["version"])
    return reply


def _checked_id(request_id: Any) -> str | None:
    if request_id is None:
        return None
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequest(f"request_id = {shown(request_id)} must be text", param="request_id")
    return check_id(request_id, "request_id")


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
