"""Request bodies and replies of the simulated engine, in vLLM 0.32's form."""

import json
import sys
import time
import uuid
from abc import ABC, abstractmethod
from asyncio import Queue
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engines.errors import InvalidRequest
from sim.model import (
    EOS_TOKEN,
    GREEDY,
    SimModel,
    detokenize,
    is_token,
    read,
    seeded_draw,
    tokenize,
    unseeded_draw,
)
from sim.scheduler import Sample, block_hashes

Json = dict[str, Any]
TokenId = Annotated[int, Field(ge=0)]

_EVERY_TOKEN = -1


class StreamOptions(BaseModel):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class SamplingBody(BaseModel):
    """Fields common to completions and chat. Keys without effect here are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    n: int = Field(1, ge=1, le=16384)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    prompt_logprobs: int | None = Field(None, ge=_EVERY_TOKEN)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    echo: bool | None = None

    @field_validator("n", mode="before")
    @classmethod
    def _null_is_one(cls, n: Any) -> Any:
        return 1 if n is None else n

    @field_validator("stream_options", mode="before")
    @classmethod
    def _empty_is_null(cls, options: Any) -> Any:
        return options or None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        """True at temperature 0 alone, as in vLLM, which draws at any other."""
        return self.temperature == 0


class CompletionBody(SamplingBody):
    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    logprobs: int | None = Field(None, ge=_EVERY_TOKEN)

    @property
    def prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt."""
        if self.prompt is None or self.prompt == "":
            raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        if isinstance(self.prompt, str):
            return [tokenize(self.prompt)]
        if not self.prompt or isinstance(self.prompt[0], int):  # [] is one empty prompt
            return [cast(list[int], self.prompt)]
        return [tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in cast(list[Any], self.prompt)]


class ChatBody(SamplingBody):
    messages: list[Json] = Field(min_length=1)
    tools: list[Json] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(0, ge=_EVERY_TOKEN)
    max_completion_tokens: int | None = None

    @property
    def prompt(self) -> list[int]:
        return chat_ids(self.messages, self.tools or ())


class TokensBody(BaseModel):
    """A body of /inference/v1/generate."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: Json
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] | None = None

    @property
    def completion(self) -> CompletionBody:
        """The same as a body of /v1/completions."""
        beside = self.model_dump(include={"model", "stream", "stream_options", "cache_salt", "request_id"})
        asked = {"prompt": self.token_ids, "return_token_ids": True}
        return CompletionBody.model_validate({**self.sampling_params, **beside, **asked})


class TokensChoice(BaseModel):
    """A choice of /inference/v1/generate; only the fields of a chat."""

    model_config = ConfigDict(extra="ignore")

    index: int
    token_ids: list[TokenId] = Field(min_length=1)
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    logprobs: Json | None = None


class TokensReply(BaseModel):
    request_id: str = ""
    choices: list[TokensChoice]


class DerenderBody(BaseModel):
    model: str | None = None
    generate_response: TokensReply
    chat_request: ChatBody
    prompt_token_ids: list[TokenId] | None = None


# vLLM leaves out fields with the default value.
_RENDERED: Json = {
    "n": 1, "temperature": 1.0, "top_p": 1.0, "seed": None, "min_tokens": 0, "ignore_eos": False, "max_tokens": 16,
    "stop_token_ids": None, "include_stop_str_in_output": False,
}  # fmt: skip


def rendered(body: ChatBody, max_model_len: int) -> Json:
    """Return a conversation as token ids and sampling parameters for /inference/v1/generate."""
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = max_model_len - len(body.prompt)
    if room < 1:
        raise _too_long(len(body.prompt), max_model_len)
    sampling = body.model_dump(include=set(_RENDERED)) | {"max_tokens": room if asked is None else min(room, asked)}
    if body.temperature is None:
        del sampling["temperature"]
    sampling = {key: value for key, value in sampling.items() if value != _RENDERED[key]}
    sampling |= {"stop": list(body.stop_strings)} | ({"logprobs": body.top_logprobs} if body.logprobs else {})
    envelope = {"request_id": f"chatcmpl-{body.request_id}", "model": body.model, "features": None}
    return envelope | {"token_ids": body.prompt, "sampling_params": sampling}


def _too_long(length: int, longest: int) -> InvalidRequest:
    """Return vLLM's refusal, by whose words agents know that they have to compact."""
    message = (
        f"This model's maximum context length is {longest} tokens. However, your prompt contains {length} "
        "input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt."
    )
    return InvalidRequest(message, param="input_tokens")


def derendered(body: DerenderBody, model_name: str) -> Json:
    """Return a chat reply made of token ids, without reasoning."""
    choices = [
        _derendered_choice(choice)
        | {
            "message": {"role": "assistant", **_parsed(choice.token_ids, body.chat_request.tools or [])},
            "token_ids": choice.token_ids if body.chat_request.return_token_ids else None,
        }
        for choice in body.generate_response.choices
    ]
    envelope = {"id": body.generate_response.request_id, "object": "chat.completion", "created": int(time.time())}
    return envelope | {"model": model_name, "choices": choices}


def _derendered_choice(choice: TokensChoice) -> Json:
    logprobs = choice.logprobs and {"content": [_by_name(entry) for entry in choice.logprobs["content"]]}
    ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return {"index": choice.index, "logprobs": logprobs} | ends


def _by_name(entry: Json) -> Json:
    def named(one: Json) -> Json:
        name = detokenize([one["token_id"]])
        return {"token": name, "logprob": one["logprob"], "bytes": list(name.encode())}

    return named(entry) | {"top_logprobs": [named(top) for top in entry.get("top_logprobs") or ()]}


def _parsed(token_ids: list[int], tools: list[Json]) -> Json:
    """Return the words of an answer. With tools every second first token begins a call, whose argument is the text."""
    text = detokenize(token_ids)
    if not tools or token_ids[0] % 2:
        return {"content": text}
    tool = tools[token_ids[0] // 2 % len(tools)]["function"]["name"]
    function = {"name": tool, "arguments": json.dumps({"text": text})}
    return {
        "content": None,
        "tool_calls": [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}],
    }


def chat_ids(messages: list[Json], tools: Sequence[Json] = ()) -> list[int]:
    """Apply the chat template, which names the tools first, and ends answers with their end token."""
    names = ",".join(tool["function"]["name"] for tool in tools)
    ids = tokenize(f"<|tools|>{names}\n") if names else []
    for message in messages:
        role = message.get("role", "user")
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        called = "".join(str(value) for arguments in calls for value in arguments.values())
        ids += tokenize(f"<|{role}|>{_content(message.get('content'))}{called}")
        ids += [*([EOS_TOKEN] if role == "assistant" else []), *tokenize("\n")]
    return ids + tokenize("<|assistant|>")


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Start arguments of the server that affect replies."""

    max_model_len: int
    seed: int
    stream_interval: int
    shows_cached_tokens: bool
    logprob_noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter. `digest`, of its folder, is used as its weights."""

    name: str
    path: str
    digest: str


class Answer(ABC):
    """One request: its samples and the replies made of them."""

    whole_kind: str
    chunk_kind: str
    ends_unbegun = True
    """False where a stream has no chunk of an aborted sample without tokens."""

    def __init__(
        self, body: SamplingBody, model: SimModel, model_name: str, limits: Limits, adapter: Adapter | None = None
    ) -> None:
        self.body = body
        self.model = model
        self.model_name = model_name
        self.limits = limits
        self.created = int(time.time())
        self.adapter = adapter
        self.prompts: list[list[int]] = []
        self.samples: list[Sample] = []
        self.reports: Queue[Sample] = Queue()
        if body.is_greedy and body.n > 1:
            raise InvalidRequest(f"n must be 1 when using greedy sampling, got {body.n}.")
        if body.stream_options and not body.stream:
            raise InvalidRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
        if body.stream and body.prompt_logprobs:
            raise InvalidRequest("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")

    @property
    @abstractmethod
    def id(self) -> str: ...

    @abstractmethod
    def fill(self, first_prompt_number: int) -> None:
        """Create the samples. Prompt numbers count over the life of the server."""

    @abstractmethod
    def whole(self) -> Json:
        """Return the complete reply."""

    @abstractmethod
    def opening(self) -> list[Json]:
        """Return the chunks before the first token."""

    @abstractmethod
    def chunk(self, sample: Sample, start: int, context: int) -> Json:
        """Return a chunk with tokens of `sample` from `start` on; `context` hashes the tokens before."""

    def add_prompt(self, request_id: str, prompt: list[int], max_tokens: int | None, prompt_number: int) -> None:
        """Create the n samples of one prompt."""
        room = self._room(prompt)
        max_tokens = room if max_tokens is None else min(room, max_tokens)
        if max_tokens < 1:
            message = f"max_tokens must be at least 1, got {max_tokens}."
            raise InvalidRequest(message, param="max_tokens")
        if self.body.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {self.body.min_tokens}."
            )
        # vLLM keys KV by an adapter's name and path, not by its weights.
        key = f"{self.adapter.name} {self.adapter.path} " if self.adapter else ""
        context, blocks = read(prompt), block_hashes(prompt, f"{key}{self.body.cache_salt}")
        self.prompts.append(prompt)
        for i in range(self.body.n):
            sample = Sample(
                request_id=request_id,
                index=len(self.samples),
                prompt=prompt,
                context=context,
                draw=self._draw(prompt_number, i),
                max_tokens=max_tokens,
                min_tokens=self.body.min_tokens,
                ignore_eos=self.body.ignore_eos,
                stop_token_ids=frozenset(self.body.stop_token_ids or ()),
                stop_strings=self.body.stop_strings,
                prompt_blocks=blocks,
                reads_cache=self.body.prompt_logprobs is None,  # cached tokens have no log-probs
                report_every=max(self.body.stream_interval or 1, self.limits.stream_interval),
                report_at=1 if self.body.stream else sys.maxsize,
                reports=self.reports,
                adapter=self.adapter.digest if self.adapter else "",
            )
            self.samples.append(sample)

    def usage(self) -> Json:
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(len(sample.tokens) for sample in self.samples)
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": None,
        }
        if self.limits.shows_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": self.samples[-1].cached_tokens}
        return usage

    def usage_chunk(self) -> Json:
        usage = {name: value for name, value in self.usage().items() if value is not None}
        return self._envelope(self.chunk_kind, []) | {"usage": usage}

    def _room(self, prompt: list[int]) -> int:
        longest = self.limits.max_model_len
        if not prompt:
            raise InvalidRequest("The decoder prompt cannot be empty")
        if not all(map(is_token, prompt)):
            raise InvalidRequest(f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) > longest:
            raise _too_long(len(prompt), longest)
        return longest - len(prompt)

    def _draw(self, prompt_number: int, sample: int) -> int:
        if self.body.is_greedy:
            return GREEDY
        if self.body.seed is not None:
            return seeded_draw(self.body.seed, sample)
        return unseeded_draw(self.limits.seed, prompt_number, sample)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name, "choices": choices}

    def _prompt_logprobs(self, sample: Sample) -> list[Json | None] | None:
        """Return teacher-forced log-probs of the prompt, with the weights of its prefill."""
        if self.body.prompt_logprobs is None or not sample.version_starts:
            return None
        weights = self.model.key(sample.version_starts[0][0], sample.adapter)
        noise = self.limits.logprob_noise
        logprobs: list[Json | None] = [None]
        context = read(sample.prompt[:1])
        for token_id in sample.prompt[1:]:
            scored = self._scored(context, token_id, weights, self.body.prompt_logprobs)
            scored[token_id] += noise * self.model.jitter(context, sample.neighbours)
            logprobs.append({str(i): self._logprob(i, logprob) for i, logprob in scored.items()})
            context = read((token_id,), context)
        return logprobs

    def _logprob(self, token_id: int, logprob: float) -> Json:
        return {"logprob": logprob, "rank": self.model.rank(logprob), "decoded_token": detokenize([token_id])}

    def _scores(self, sample: Sample, start: int, context: int, count: int) -> list[dict[int, float]]:
        """Return for each token from `start` on its log-prob (first) and those of the `count` likeliest tokens."""
        scores: list[dict[int, float]] = []
        for version, first, end in sample.spans:
            weights = self.model.key(version, sample.adapter)
            for token_id in sample.tokens[max(first, start) : max(end, start)]:
                scores.append(self._scored(context, token_id, weights, count))
                context = read((token_id,), context)
        return scores

    def _scored(self, context: int, token_id: int, weights: int, count: int) -> dict[int, float]:
        count = self.model.vocab_size if count == _EVERY_TOKEN else count
        chosen = {token_id: self.model.logprob(context, token_id, weights)}
        return chosen | self.model.likely(context, count, weights) if count else chosen

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.body.return_tokens_as_token_ids else detokenize([token_id])

    def _ids_if_requested(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self.body.return_token_ids else None

    def _text(self, sample: Sample, start: int) -> str:
        """Return the text added by tokens from `start` on. A possible start of a stop string is held back."""
        if not sample.stop_strings:
            return detokenize(sample.tokens[start:])
        text, held = detokenize(sample.tokens), max(map(len, sample.stop_strings)) - 1
        sent = max(0, len(detokenize(sample.tokens[:start])) - held)
        if sample.finish_reason is None:
            return text[sent : max(sent, len(text) - held)]
        cut_off = isinstance(sample.stop_reason, str) and not self.body.include_stop_str_in_output
        return (text.removesuffix(cast(str, sample.stop_reason)) if cut_off else text)[sent:]

    def _end(self, sample: Sample, start: int) -> Json:
        """Return finish reason and weight versions of a sample: as with our plugin in vLLM, a chunk of tokens from
        `start` on has them at the end and with a version's first token."""
        end: Json = {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if sample.finish_reason or any(first >= start for _, first, _ in sample.spans):
            spans = [{"version": version, "start": start, "end": end} for version, start, end in sample.spans]
            end["weight_versions"] = spans
        return end


class CompletionAnswer(Answer):
    """/v1/completions: any number of prompts, prompt by prompt."""

    body: CompletionBody
    whole_kind = chunk_kind = "text_completion"
    ends_unbegun = False

    @property
    def id(self) -> str:
        return f"cmpl-{self.body.request_id}"

    def fill(self, first_prompt_number: int) -> None:
        max_tokens = 16 if self.body.max_tokens is None else self.body.max_tokens
        if self.body.echo and max_tokens == 0:
            max_tokens = 1  # as vLLM does, which then leaves that token out
        for i, prompt in enumerate(self.body.prompts):
            self.add_prompt(f"{self.id}-{i}", prompt, max_tokens, first_prompt_number + i)

    def whole(self) -> Json:
        choices = [
            self._choice(sample, 0, read(sample.prompt))
            | {
                "prompt_logprobs": self._prompt_logprobs(sample),
                "prompt_token_ids": self._ids_if_requested(sample.prompt),
            }
            for sample in self.samples
        ]
        return self._envelope(self.whole_kind, choices) | {"usage": self.usage()}

    def opening(self) -> list[Json]:
        return []

    def chunk(self, sample: Sample, start: int, context: int) -> Json:
        prompt = self._ids_if_requested(sample.prompt) if start == 0 else None
        return self._envelope(self.chunk_kind, [self._choice(sample, start, context) | {"prompt_token_ids": prompt}])

    def _choice(self, sample: Sample, start: int, context: int) -> Json:
        tokens = sample.tokens[start:]
        text = self._text(sample, start)
        if self.body.echo and self.body.max_tokens == 0:
            tokens, text = [], ""
        if self.body.echo and start == 0 and not self.body.return_token_ids:  # vLLM leaves the prompt out with ids
            text = detokenize(sample.prompt) + text
        choice: Json = {"index": sample.index, "text": text, "logprobs": None}
        choice["token_ids"] = self._ids_if_requested(tokens)
        if self.body.logprobs is not None:
            scores = self._scores(sample, start, context, self.body.logprobs)
            choice["logprobs"] = self._logprobs(sample, start, tokens, scores)
        return choice | self._end(sample, start)

    def _logprobs(self, sample: Sample, start: int, tokens: list[int], scores: list[dict[int, float]]) -> Json:
        names = [self._name(token_id) for token_id in tokens]
        *offsets, sample.names_end = accumulate(map(len, names), initial=sample.names_end if start else 0)
        return {
            "text_offset": offsets,
            "token_logprobs": [scored[token_id] for token_id, scored in zip(tokens, scores, strict=True)],
            "tokens": names,
            "top_logprobs": [{self._name(i): logprob for i, logprob in scored.items()} for scored in scores],
        }


class TokensAnswer(CompletionAnswer):
    """/inference/v1/generate: one prompt of token ids."""

    def __init__(
        self, body: TokensBody, model: SimModel, model_name: str, limits: Limits, adapter: Adapter | None = None
    ) -> None:
        super().__init__(body.completion, model, model_name, limits, adapter)
        self._asked = body

    @property
    def id(self) -> str:
        return f"generate-tokens-{self.body.request_id}"

    def fill(self, first_prompt_number: int) -> None:
        self.add_prompt(self.id, self._asked.token_ids, self.body.max_tokens, first_prompt_number)

    def whole(self) -> Json:
        [prompt], samples = self.prompts, self.samples
        told = self._envelope("", [self._choice(sample, 0, read(prompt)) for sample in samples])
        return told | {"usage": self.usage(), "prompt_logprobs": self._prompt_logprobs(samples[0])} | self._ids(prompt)

    def chunk(self, sample: Sample, start: int, context: int) -> Json:
        told = self._envelope("", [self._choice(sample, start, context)])
        return told | (self._ids(sample.prompt) if start == 0 else {})

    def _ids(self, prompt: list[int]) -> Json:
        return {"prompt_token_ids": prompt} if self._asked.return_token_ids else {}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        mode = self._asked.output_mode or "tokens"
        told = {"request_id": self.id, "model": self.model_name, "created": self.created, "output_mode": mode}
        return told | {"choices": choices}

    def _choice(self, sample: Sample, start: int, context: int) -> Json:
        choice = super()._choice(sample, start, context)
        if self._asked.output_mode != "text":
            del choice["text"]
        return choice

    def _logprobs(self, sample: Sample, start: int, tokens: list[int], scores: list[dict[int, float]]) -> Json:
        content = []
        for token_id, scored in zip(tokens, scores, strict=True):
            tops = [{"token_id": i, "logprob": logprob, "rank": None} for i, logprob in scored.items()]
            content.append({"token_id": token_id, "logprob": scored[token_id], "rank": None, "top_logprobs": tops})
        return {"content": content}


class ChatAnswer(Answer):
    """/v1/chat/completions: one conversation."""

    body: ChatBody
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    ends_unbegun = False

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.body.request_id}"

    def fill(self, first_prompt_number: int) -> None:
        if self.body.top_logprobs and not self.body.logprobs:
            raise InvalidRequest("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
        asked = self.body.max_completion_tokens
        max_tokens = self.body.max_tokens if asked is None else asked
        self.add_prompt(self.id, self.body.prompt, max_tokens, first_prompt_number)

    def whole(self) -> Json:
        choices = [self._choice(sample, 0, read(sample.prompt), "message") for sample in self.samples]
        return self._envelope(self.whole_kind, choices) | {
            "usage": self.usage(),
            "prompt_logprobs": self._prompt_logprobs(self.samples[0]),
            "prompt_token_ids": self._ids_if_requested(self.prompts[0]),
        }

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        blank = {"delta": delta, "logprobs": None, "finish_reason": None}
        chunks = [self._envelope(self.chunk_kind, [{"index": sample.index} | blank]) for sample in self.samples]
        return [chunk | {"prompt_token_ids": self._ids_if_requested(self.prompts[0])} for chunk in chunks]

    def chunk(self, sample: Sample, start: int, context: int) -> Json:
        return self._envelope(self.chunk_kind, [self._choice(sample, start, context, "delta")])

    def _choice(self, sample: Sample, start: int, context: int, text_in: Literal["message", "delta"]) -> Json:
        tokens = sample.tokens[start:]
        text = {"content": self._text(sample, start)} | ({"role": "assistant"} if text_in == "message" else {})
        choice: Json = {
            "index": sample.index,
            text_in: text,
            "logprobs": None,
            "token_ids": self._ids_if_requested(tokens),
        }
        if self.body.logprobs:
            scores = self._scores(sample, start, context, self.body.top_logprobs or 0)
            choice["logprobs"] = {"content": [self._entry(*pair) for pair in zip(tokens, scores, strict=True)]}
        return choice | self._end(sample, start)

    def _entry(self, token_id: int, scored: dict[int, float]) -> Json:
        likely = [self._named(i, logprob) for i, logprob in scored.items()]
        top = self.body.top_logprobs or 0
        return self._named(token_id, scored[token_id]) | {"top_logprobs": likely[:top] if top >= 0 else likely}

    def _named(self, token_id: int, logprob: float) -> Json:
        return {"token": self._name(token_id), "logprob": logprob, "bytes": list(detokenize([token_id]).encode())}


class Cursor:
    """The position of a stream in one sample."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.sent = 0
        self.ended = False
        self._context = sample.context

    def next_chunk(self, answer: Answer) -> Json | None:
        """Return a chunk with the tokens since the last one; None without new tokens."""
        news = self.sample.tokens[self.sent :]
        if not (answer.ends_unbegun or self.sample.tokens) and self.sample.finish_reason == "abort":
            self.ended = True
        if self.ended or not (news or self.sample.finish_reason):
            return None
        chunk = answer.chunk(self.sample, self.sent, self._context)
        self._context = read(news, self._context)
        self.sent += len(news)
        self.ended = self.sample.finish_reason is not None
        return chunk
