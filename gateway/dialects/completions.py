"""/v1/completions of vLLM's dialect: a request becomes one rollout per prompt; the replies are joined prompt-major."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from engines.engine import Json
from engines.errors import EngineRefused, InvalidRequest
from engines.raw_json import encoded
from gateway.dialects.resumption import rest_sampling, whole_characters
from gateway.dialects.runner import Ask, Runner, longest_first
from gateway.dialects.sample import Reply
from gateway.dialects.sampling import MAX_PROMPTS, Terms, check_room, check_sampling, common_room
from gateway.dialects.streams import total_usage
from gateway.fleet.concurrency import together
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import End
from gateway.fleet.replica import Replica

PATH = "/v1/completions"

_ASK_TIMEOUT_S = 60.0
_CHARACTERS_PER_TOKEN = 4
# vLLM's own default of max_tokens in this dialect.
_DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class Written:
    """A reply as JSON in pieces: a choice is written when its prompt ends, and the whole is never copied.

    `head` are the fields beside the choices, which have a comma before each. `ends` are how each choice ended, and its
    versions. `seconds` are the times at which the prompts ended, from the request's start.
    """

    head: Json
    choices: list[bytes]
    ends: list[End]
    seconds: list[float]

    def pieces(self) -> list[bytes]:
        """Return the reply, which is kept until it is delivered: its client may go before, and a replay gets it."""
        return [encoded(self.head)[:-1] + b',"choices":[', *self.choices[1:], b"]}"]


@dataclass(kw_only=True)
class CompletionPrompt(Ask):
    """One prompt of a request: its place there, and the body that asks one replica for its completions."""

    request_id: str
    index: int

    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        """With token ids if that changes nothing else: a span counts tokens. Beside them vLLM leaves out an `echo`."""
        body = {**self.body, "return_token_ids": bool(self.body.get("return_token_ids") or not self.body.get("echo"))}
        if (before := self.before) is not None:
            made = before.token_ids
            if before.text and not streams:  # an engine without a tokenizer reports no text and cannot detokenise
                made = await whole_characters(made, partial(_detokenized, replica, self.body.get("model")))
                before.num_read = len(made)
            body = rest_sampling(body | {"max_tokens": self.limit, "return_token_ids": True}, made, before.index)
            body |= {"prompt": [*(self.read or ()), *made]} if made else {}
        return PATH, body

    def named(self, error: EngineRefused) -> EngineRefused:
        if isinstance(inner := error.body.get("error"), dict):
            message = f"prompt[{self.index}]: {inner.get('message', '')}"
            error.body = {**error.body, "error": {**inner, "message": message}}
        return error

    def bare(self) -> Json:
        return {"text": "", "logprobs": None, "prompt_logprobs": None, "token_ids": [], "prompt_token_ids": self.read}

    def bare_head(self) -> Json:
        head = {"id": f"cmpl-{self.request_id}", "object": "text_completion", "created": int(time.time())}
        return head | {"model": self.body.get("model") or self.rollout.model}

    def as_asked(self, told: Json) -> Json:
        """Numbered as the client knows its samples, and without the token ids, which are always needed here, that it
        did not ask for."""
        first, shows_ids = self.index * self.rollout.n, self.body.get("return_token_ids")
        for choice in told["choices"]:
            choice["index"] += first
            if not shows_ids:
                choice |= {"token_ids": None, "prompt_token_ids": None}
        return told | {"id": f"cmpl-{self.request_id}"}


class Completions:
    """Decodes requests, runs their prompts, joins the replies."""

    def __init__(self, fleet: Fleet, runner: Runner) -> None:
        self._fleet = fleet
        self._runner = runner
        self.stream = runner.stream

    def decode(self, body: Json, request_id: str, session: str = "") -> list[CompletionPrompt]:
        """The prompts of a request. Raises `InvalidRequest` before any replica has work, naming field and prompt.

        A turn of `session` has one prompt; the prompts of a batch are spread over all replicas.
        """
        n, values = check_sampling(body), _prompt_list(body)
        terms = Terms.take(body, self._fleet, self._runner.lengths)
        room = common_room(self._fleet, terms.model)
        # As in vLLM, null is the default, and `max_completion_tokens` is of conversations.
        limit = _DEFAULT_MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
        limit = min(limit, room or limit)
        prompts = []
        for index, value in enumerate(values):
            rollout = terms.rollout(
                f"{request_id}-{index}",
                value,
                n=n,
                prompt_tokens=_checked_length(index, value, room, body.get("truncate_prompt_tokens")),
                limit=limit,
                request=request_id,
                session=session if len(values) == 1 else "",
            )
            read = value if isinstance(value, list) else None
            asked: Json = {"request_id": request_id, "index": index, "limit": limit, "room": room, "read": read}
            prompts.append(CompletionPrompt(rollout=rollout, body={**body, "prompt": value}, **asked))
        return prompts

    async def generate(self, prompts: Sequence[CompletionPrompt]) -> Json:
        """One reply for all prompts, decoded. The first prompt that fails ends the others."""
        reply: Json = orjson.loads(b"".join((await self.written(prompts)).pieces()))
        return reply

    async def written(
        self, prompts: Sequence[CompletionPrompt], reply_to: Callable[[CompletionPrompt], Reply] | None = None
    ) -> Written:
        """As `generate`, as JSON with values as their engines wrote them. `reply_to` gives the reply that is completed,
        which is not kept here."""
        began = time.monotonic()
        if len(prompts) == 1:
            return await self._write(prompts[0], began, reply_to)
        turns = longest_first(prompts)
        made = await together(self._write(prompt, began, reply_to) for prompt in turns)
        return _joined({prompt.index: part for prompt, part in zip(turns, made, strict=True)})

    async def _write(
        self, prompt: CompletionPrompt, began: float, reply_to: Callable[[CompletionPrompt], Reply] | None
    ) -> Written:
        """Write the reply of one prompt, its samples numbered as the client knows them."""
        reply = Reply(prompt.read) if reply_to is None else reply_to(prompt)
        await self._runner.run(prompt, reply)
        self._runner.count_missing(reply.num_unscored)
        head = prompt.as_asked(prompt.told(reply))
        written = Written(head, [], [], [time.monotonic() - began])
        for sample, choice in zip(reply.samples, head.pop("choices"), strict=True):
            written.choices += b",", encoded(choice)
            written.ends.append((sample.reason, sample.spans))
        return written


def _joined(parts: Mapping[int, Written]) -> Written:
    """The replies of several prompts, by their places, as one."""
    whole = Written({}, [], [], [])
    usages = [part.head["usage"] for part in parts.values()]
    for _, part in sorted(parts.items()):
        whole.head = whole.head or part.head
        whole.choices += part.choices
        whole.ends += part.ends
        whole.seconds += part.seconds
    whole.head["usage"] = total_usage(usages)
    return whole


def _prompt_list(body: Json) -> list[Any]:
    """Every accepted form of `prompt` as a list of prompts, each a string or a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
        raise InvalidRequest(
            f"prompt has {len(prompt)} prompts, more than {MAX_PROMPTS}: send fewer at a time",
            param="prompt",
        )
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            f"prompt is {'an empty list' if prompt == [] else type(prompt).__name__}: send text, token ids, or a list "
            "of either",
            param="prompt",
        )
    return [prompt] if isinstance(prompt[0], int) else prompt


def _checked_length(index: int, value: Any, max_len: int | None, kept: Any) -> int:
    """Length in tokens; an estimate for text, which only an engine can tokenise. Engines cut a prompt to its last
    `kept` tokens; -1 is as many as fit."""
    if not isinstance(value, str | list):
        raise InvalidRequest(f"prompt[{index}] is a {type(value).__name__}, not text or token ids", param="prompt")
    if not value:
        raise InvalidRequest(f"prompt[{index}] is empty: an engine needs at least one token", param="prompt")
    if isinstance(value, str):
        return math.ceil(len(value) / _CHARACTERS_PER_TOKEN)
    if type(kept) is int:
        return min(len(value), kept if kept >= 0 else max_len or len(value))
    return check_room(f"prompt[{index}]", len(value), max_len)


async def _detokenized(replica: Replica, model: str | None, token_ids: list[int]) -> str:
    asked: dict[str, Any] = {"tokens": token_ids} | ({} if model is None else {"model": model})  # SGLang refuses null
    return str((await replica.engine.ask("POST", "/detokenize", asked, _ASK_TIMEOUT_S))["prompt"])
