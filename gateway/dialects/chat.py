"""/v1/chat/completions of vLLM's dialect: one conversation is one rollout."""

import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest
from engines.types import Dialect
from gateway.config.schema import GatewayConfig
from gateway.dialects.expected import read_expected, without_own_fields
from gateway.dialects.freshness import read_freshness
from gateway.dialects.parallel import merged
from gateway.dialects.replies.assembly import Assembly, is_read_in_chunks
from gateway.dialects.replies.carried import opened
from gateway.dialects.replies.chunks import read_chunks
from gateway.dialects.resumption.chat import NO_WORDS, ChatContinuation, is_medium
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.dialects.resumption.delivered_chat import DeliveredChat
from gateway.dialects.resumption.tokens import refuse_half_called
from gateway.dialects.runner import Exchange, Part, Runner
from gateway.dialects.sampling import asks_vllm, check_replica, check_sampling, versioned_salt
from gateway.dialects.token_generation import TokenGeneration
from gateway.dialects.usage import Usage, usage_of_joined, wants_usage, with_usage_rule
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempt_loop import using
from gateway.fleet.placement.inquiries import Inquiries
from gateway.fleet.placement.lengths import prompt_key
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

PATH = "/v1/chat/completions"

# Load of a conversation that names no limit; an engine would let it fill the context.
_DEFAULT_MAX_TOKENS = 1024
_CHARACTERS_PER_TOKEN = 4
# Load of an image or a sound, whose tokens do not depend on its bytes.
_CHARACTERS_PER_MEDIUM = 4096


class Chat:
    """Decodes a conversation and has replicas continue it."""

    def __init__(
        self, config: GatewayConfig, fleet: Fleet, runner: Runner, tokens: TokenGeneration, inquiries: Inquiries
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._runner = runner
        self._continuation = ChatContinuation(fleet, inquiries, tokens, config.queue_timeout_s)

    def decode(self, body: Json, request_id: str, session: str = "") -> Rollout:
        """Raises `InvalidRequest` for fields that no engine would take."""
        model, adapter = self._fleet.asked(body.get("model") or None)
        n = check_sampling(body)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages must be a list of at least one message", param="messages")
        limit = _limit(body)
        characters = sum(map(_characters, messages))
        fresh = read_freshness(body, self._fleet, model)
        key = _key(messages, session)
        expected = read_expected(body)[0] or self._runner.expected(model, key)
        tokens = characters // _CHARACTERS_PER_TOKEN + n * min(limit, math.ceil(expected or limit))
        return Rollout(
            request_id=request_id,
            model=model,
            n=n,
            tokens=tokens,
            prompt_tokens=characters // _CHARACTERS_PER_TOKEN,
            needs_ids=asks_vllm(body),
            min_version=fresh.min_version,
            max_staleness=fresh.max_staleness,
            session=session,
            adapter=adapter,
            expected=expected,
            prompt_key=key,
        )

    async def generate(self, rollout: Rollout, body: Json) -> Json:
        body = without_own_fields(body)
        conversation = _Conversation(self._config, rollout, body, self._continuation)
        with using(rollout):
            answer = await self._runner.generate(conversation)
            worded = await self._continuation.worded(rollout, body, answer)
            if worded is None:
                worded = await self._runner.generate(replace(conversation, reads_whole=True))
        answer = {**worded, "object": "chat.completion", "prompt_logprobs": worded.get("prompt_logprobs")}
        if not body.get("return_token_ids"):
            for choice in answer["choices"]:
                choice["token_ids"] = None
            answer["prompt_token_ids"] = None
        return answer

    async def stream(self, rollout: Rollout, body: Json, usage: Usage) -> AsyncGenerator[Json]:
        """Chunks in the order of arrival; counts up `usage`, whether or not the client asks for it."""
        body, last = without_own_fields(body), Json()
        conversation = _Conversation(self._config, rollout, body, self._continuation)
        with using(rollout):
            async with aclosing(self._stream_all(conversation, usage)) as chunks:
                async for chunk in chunks:
                    if chunk["choices"]:
                        yield with_usage_rule(chunk, body)
                    else:
                        last = chunk
        if last and wants_usage(body):
            yield last

    async def _stream_all(self, conversation: "_Conversation", usage: Usage) -> AsyncGenerator[Json]:
        body, resumes = conversation.body, conversation.resumes_stream
        has_ids = resumes or (conversation.shows_all and bool(body.get("return_token_ids")))
        rollout = conversation.rollout
        inexact = conversation.inexact if resumes else None
        cut = CutStream(range(rollout.n), rollout.adapter, inexact=inexact, has_ids=has_ids)
        chunk, counted = Json(), Json()
        async with aclosing(self._runner.stream(conversation, cut)) as chunks:
            async for chunk in chunks:
                counted = chunk.get("usage") or counted
                usage.add_chunk(0, counted)
                if not body.get("return_token_ids") and "prompt_token_ids" in chunk:
                    chunk["prompt_token_ids"] = None
                chunk["choices"] = [_shown(choice, body) for choice in chunk["choices"]]
                yield chunk
        envelope = {key: chunk.get(key) for key in ("id", "object", "created", "model")}
        if not (made := cut.cut_off()):
            if cut.is_cut:
                usage.add_chunk(0, cut.usage(counted, {"completion_tokens": 0}))
                yield envelope | {"choices": [], "usage": usage.total()}
            return
        delivered = conversation.delivered
        opened = await self._continuation.opened(rollout, body, made, delivered)
        for choice in delivered.kept if opened is None else opened.held_back:
            if _has_news(choice, body):
                yield envelope | {"choices": [_shown(choice, body)]}
        if opened is None:
            for choice in cut.ends():
                yield envelope | {"choices": [choice | {"delta": {}}]}
            return
        self._runner.count_kept(len(part["token_ids"]) for part in made.values())
        tokens = 0
        rests = [self._continuation.stream(rollout, body, opened, index) for index in made]
        async with aclosing(merged(rests)) as rest:
            async for choice in rest:
                tokens += len(choice["token_ids"] or ())
                cut.follow(choice)
                usage.add_chunk(0, cut.usage(counted, {"completion_tokens": tokens}))
                if _has_news(choice, body):
                    yield envelope | {"choices": [_shown(choice, body)], "usage": usage.total()}
        yield envelope | {"choices": [], "usage": usage.total()}


@dataclass(frozen=True)
class _Conversation(Exchange):
    """One conversation as its body asks for it. `delivered` is the part of its stream that the client has.

    `reads_whole` is True where no engine parses the tokens of a reply that was read in chunks.
    """

    config: GatewayConfig
    rollout: Rollout
    body: Json
    continuation: ChatContinuation
    delivered: DeliveredChat = field(default_factory=DeliveredChat)
    reads_whole: bool = False

    @property
    def inexact(self) -> tuple[str, ...] | None:
        return self.continuation.inexact(self.rollout, self.body)

    @property
    def shows_all(self) -> bool:
        """False where vLLM leaves out reasoning, and the token ids of a stream with it."""
        return self.body.get("include_reasoning") is not False

    @property
    def resumes_stream(self) -> bool:
        return self.shows_all and self.resumes

    def prompt_ids(self, answer: Json) -> list[int] | None:
        return answer.get("prompt_token_ids")

    async def ask(self, replica: Replica, part: Part) -> Json:
        check_replica(self.body, replica)
        asked = {**self.body, "cache_salt": self._salt(replica), "return_token_ids": True}
        timeout_s = self.config.generate_timeout_s
        if self._is_read_in_chunks(replica):
            streamed = asked | {"stream_options": {"include_usage": True}}
            events = replica.engine.events(PATH, streamed, timeout_s)
            assembly = Assembly(self.rollout.n, replica.replica_id, has_text=False)
            answer: Json = opened(await part.read(events, assembly))
        else:
            answer = await replica.engine.generate(PATH, asked, timeout_s)
        refuse_half_called(answer, replica)
        return answer

    def _is_read_in_chunks(self, replica: Replica) -> bool:
        return (
            not self.reads_whole
            and replica.info.dialect is Dialect.VLLM  # SGLang tells no token ids in the stream of a conversation
            and is_read_in_chunks(self.body, _limit(self.body), self.rollout, replica.info)
            and self.resumes_stream
        )

    def chunks(self, replica: Replica) -> AsyncGenerator[list[Json]]:
        check_replica(self.body, replica)
        options = {**(self.body.get("stream_options") or {}), "include_usage": True}
        ids = {"return_token_ids": True} if self.resumes_stream else {}
        asked = {**self.body, "cache_salt": self._salt(replica), "stream_options": options, **ids}
        return read_chunks(replica, PATH, asked, self.rollout.n, self.config.generate_timeout_s)

    async def continued(self, answer: Json, cut: list[int]) -> Json | None:
        return await self.continuation.continued(self.rollout, self.body, answer, cut)

    def bare_reply(self) -> Json:
        blank = self._bare("chat.completion", {"message": NO_WORDS})
        return blank | {"prompt_token_ids": None, "prompt_logprobs": None}

    def bare_chunk(self) -> Json:
        return self._bare("chat.completion.chunk", {"delta": {"content": ""}})

    def _bare(self, kind: str, words: Json) -> Json:
        head = {"id": f"chatcmpl-{self.rollout.request_id}", "object": kind, "created": int(time.time())}
        choices = [{"index": index, **words, "logprobs": None, "token_ids": []} for index in range(self.rollout.n)]
        usage = usage_of_joined({"usage": {"prompt_tokens": 0}}, choices)
        return head | {"model": self.body.get("model") or self.rollout.model, "choices": choices, "usage": usage}

    def shows(self, choice: Json, *, is_cut: bool) -> bool:
        if is_cut:
            self.delivered.keep(choice)
            return False
        self.delivered.see(choice)
        return _has_news(choice, self.body)

    def _salt(self, replica: Replica) -> str:
        return versioned_salt(self.body, replica.weight_version, self.rollout.adapter)


def _characters(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return len(str(message))
    return sum(_CHARACTERS_PER_MEDIUM if is_medium(part) else len(str(part)) for part in content)


def _key(messages: list[Any], session: str) -> int:
    """The key of a conversation's lengths; none for a turn, which does not come again, and for parts such as images."""
    is_plain = all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
    return prompt_key(str(messages)) if is_plain and not session else 0


def _limit(body: Json) -> int:
    return body.get("max_completion_tokens") or body.get("max_tokens") or _DEFAULT_MAX_TOKENS


def _has_news(choice: Json, body: Json) -> bool:
    """True if a choice has something for the client: vLLM sends ids also of text that its parsers hold back."""
    fields = ("delta", "finish_reason", "logprobs") + (("token_ids",) if body.get("return_token_ids") else ())
    return any(choice.get(field) for field in fields)


def _shown(choice: Json, body: Json) -> Json:
    """The choice without token ids, which continuation needs, unless the client asked for them."""
    return choice if body.get("return_token_ids") or "token_ids" not in choice else choice | {"token_ids": None}
