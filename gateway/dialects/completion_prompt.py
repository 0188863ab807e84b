"""One prompt of /v1/completions as a rollout: the body for an engine, and the continuation from tokens made so far."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.engine import Json
from engines.errors import EngineRefused
from gateway.config.schema import GatewayConfig
from gateway.dialects.replays.batch import Making
from gateway.dialects.replies.assembly import Assembly, is_read_in_chunks
from gateway.dialects.replies.carried import carried_reply, opened
from gateway.dialects.replies.chunks import read_chunks
from gateway.dialects.resumption.features import inexact_fields, marked
from gateway.dialects.resumption.tokens import joined, rest_body, whole_characters
from gateway.dialects.runner import Exchange, Part, Runner
from gateway.dialects.sampling import check_replica, versioned_salt
from gateway.dialects.usage import usage_of_joined
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from gateway.fleet.together import together

PATH = "/v1/completions"

# vLLM's own default of max_tokens in this dialect.
DEFAULT_MAX_TOKENS = 16
_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CompletionPrompt(Exchange):
    """One prompt of a request: its place there, and the body that asks one replica for its completions.

    `limit` is the largest number of tokens of a sample, `room` that of prompt and sample together; None where it is not
    known. `made` are tokens of the one sample that continues here, which engines read after the prompt; `has_text` is
    True if the client got their text. `keeps_record` is True where chunks have the spans so far. `making` records what
    engines make of a batch; None where no record is kept. `parts` is the number of parts that the samples of the
    client's prompt are in; this is one of them.
    """

    runner: Runner
    config: GatewayConfig
    request_id: str
    index: int
    rollout: Rollout
    body: Json
    limit: int
    room: int | None = None
    made: tuple[int, ...] = ()
    has_text: bool = False
    keeps_record: bool = False
    making: Making | None = None
    parts: int = 1

    @property
    def number(self) -> int:
        """Place of the client's prompt in the request."""
        return self.index // self.parts

    @property
    def _is_first_part(self) -> bool:
        return self.index % self.parts == 0

    def share_of(self, usage: Json | None) -> Json | None:
        """The usage of a reply as it counts for the request: the first part has the prompt's tokens."""
        if not usage or self._is_first_part:
            return usage
        return usage | {"prompt_tokens": 0, "prompt_tokens_details": None}

    @property
    def indexes(self) -> range:
        """Places of the samples in the client's reply."""
        return range(self.index * self.rollout.n, (self.index + 1) * self.rollout.n)

    @property
    def inexact(self) -> tuple[str, ...] | None:
        return inexact_fields(self.body)

    @property
    def is_full(self) -> bool:
        num_made, room = len(self.made), self.room
        has_no_room = room is not None and len(self.body["prompt"]) + num_made >= room
        return num_made > 0 and (num_made >= self.limit or has_no_room)

    def prompt_ids(self, answer: Json) -> list[int] | None:
        return next(
            (choice["prompt_token_ids"] for choice in answer["choices"] if choice.get("prompt_token_ids")), None
        )

    @property
    def has_ids(self) -> bool:
        """False with `echo` unless the client asks for token ids: vLLM leaves the prompt out beside them."""
        return bool(self.body.get("return_token_ids") or not self.body.get("echo"))

    async def ask(self, replica: Replica, part: Part) -> Json:
        check_replica(self.body, replica)
        body = await self._whole_body(replica)
        timeout_s = self.config.generate_timeout_s
        is_whole = not is_read_in_chunks(body, self.limit, self.rollout, replica.info, parts=self.parts)
        note = self.making.begin(replica, part.flight, is_whole=is_whole) if self.making else None
        try:
            if is_whole:
                content = await replica.engine.reply(PATH, body, timeout_s)
                if note is not None:
                    note([content])
                return carried_reply(content, PATH, replica.replica_id)
            events = replica.engine.events(PATH, body | {"stream_options": {"include_usage": True}}, timeout_s)
            return await part.read(events, Assembly(self.rollout.n, replica.replica_id), note)
        except EngineRefused as error:
            raise _naming_prompt(error, self.number) from error

    async def chunks(self, replica: Replica) -> AsyncGenerator[list[Json]]:
        check_replica(self.body, replica)
        body = self._engine_body(replica)
        options = {**(self.body.get("stream_options") or {}), "include_usage": True}
        if self.made:
            body = rest_body(body, [*body["prompt"], *self.made], len(self.made))
        asked, timeout_s = body | {"stream_options": options}, self.config.generate_timeout_s
        async with aclosing(read_chunks(replica, PATH, asked, self.rollout.n, timeout_s)) as blocks:
            async for chunks in blocks:
                for chunk in chunks:
                    self._number(chunk)
                yield chunks

    def _number(self, chunk: Json) -> None:
        """Name a chunk as the client knows it."""
        chunk["id"] = f"cmpl-{self.request_id}"
        for choice in chunk["choices"]:
            choice["index"] += self.indexes.start

    async def continued(self, answer: Json, cut: list[int]) -> Json:
        if self.making:
            self.making.cut(answer)
        choices = list(answer["choices"])
        rests = await together(self.runner.generate(self.rest_of(choices[place])) for place in cut)
        for place, rest in zip(cut, rests, strict=True):
            choices[place] = marked(joined(choices[place], opened(rest["choices"][0])), self.inexact or ())
        return {**answer, "choices": choices, "usage": usage_of_joined(answer, choices)}

    def bare_reply(self) -> Json:
        head = {"id": f"cmpl-{self.request_id}", "object": "text_completion", "created": int(time.time())}
        choices = [self._bare_choice(index) for index in range(self.rollout.n)]
        usage = usage_of_joined({"usage": {"prompt_tokens": len(self._read or ())}}, choices)
        return head | {"model": self.body.get("model") or self.rollout.model, "choices": choices, "usage": usage}

    def bare_chunk(self) -> Json:
        return self.bare_reply() | {"choices": [self._bare_choice(index) for index in self.indexes]}

    def _bare_choice(self, index: int) -> Json:
        bare: Json = {"text": "", "logprobs": None, "prompt_logprobs": None, "token_ids": []}
        return {"index": index, **bare, "prompt_token_ids": self._read}

    @property
    def _read(self) -> list[int] | None:
        """Token ids that an engine reads; None for text."""
        prompt = self.body["prompt"]
        return None if isinstance(prompt, str) else [*prompt, *self.made]

    def rest_of(self, choice: Json, index: int | None = None) -> "CompletionPrompt":
        """The prompt that continues a choice. `index` is its place in the client's reply, for a stream."""
        limit = self.limit
        read: list[int] = choice["prompt_token_ids"]
        kept = len(read) - len(self.body["prompt"]) if self.made else 0
        sample = choice["index"] if index is None else index - self.indexes.start
        body = rest_body(self.body | {"max_tokens": limit, "return_token_ids": True}, read, kept, sample)
        rollout = replace(
            self.rollout, n=1, tokens=len(read) + limit - kept, goes_on=True, attempts=self.rollout.attempts.branch()
        )
        parts = self.parts if index is None else self.parts * self.rollout.n
        index = self.index if index is None else index
        made, has_text = tuple(choice["token_ids"]), bool(choice.get("text"))
        limit -= kept
        making = self.making and self.making.rest(choice["index"])
        rest = replace(self, index=index, parts=parts, rollout=rollout, body=body, limit=limit)
        return replace(rest, made=made, has_text=has_text, making=making)

    async def _whole_body(self, replica: Replica) -> Json:
        body = self._engine_body(replica)
        if not self.made:
            return body
        made = list(self.made)
        if self.has_text:  # an engine without a tokenizer reports no text and cannot detokenise
            made = await whole_characters(made, partial(_detokenized, replica, self.body.get("model")))
        return rest_body(body, [*body["prompt"], *made], len(made))

    def _engine_body(self, replica: Replica) -> Json:
        """With token ids if that changes nothing else: a span counts tokens."""
        salt = versioned_salt(self.body, replica.weight_version, self.rollout.adapter)
        return {**self.body, "cache_salt": salt, "return_token_ids": self.has_ids}


async def _detokenized(replica: Replica, model: str | None, token_ids: list[int]) -> str:
    asked: dict[str, Any] = {"tokens": token_ids} | ({} if model is None else {"model": model})  # SGLang refuses null
    return str((await replica.engine.ask("POST", "/detokenize", asked, _ASK_TIMEOUT_S))["prompt"])


def _naming_prompt(error: EngineRefused, index: int) -> EngineRefused:
    """The engine's own error with the prompt's number."""
    body = error.body
    if isinstance(inner := body.get("error"), dict):
        body = {**body, "error": {**inner, "message": f"prompt[{index}]: {inner.get('message', '')}"}}
    named = EngineRefused(str(error), status=error.status, body=body, replica_id=error.replica_id)
    named.retry_after_s = error.retry_after_s
    return named
