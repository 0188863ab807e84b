"""POST /generate of SGLang's dialect, answered by engines of any kind through `Completions`: translated into vLLM's
completions, and back.

    SGLang                                        vLLM
    text, input_ids                               prompt
    sampling_params.max_new_tokens (128), min_..  max_tokens, min_tokens
    sampling_seed                                 seed
    json_schema, regex, ebnf, structural_tag      structured_outputs
    no_stop_trim                                  include_stop_str_in_output
    extra_key                                     cache_salt
    lora_path                                     model
    return_logprob, top_logprobs_num k            logprobs k
    logprob_start_len >= 0                        prompt_logprobs k, from that token on

A field without a counterpart in vLLM's dialect is refused by name, unless its value changes nothing (null, false,
empty).
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from engines.raw_json import decoded, opened
from gateway.dialects.completions import CompletionPrompt, Completions
from gateway.dialects.sample import Sample
from gateway.dialects.sampling import check_id
from gateway.dialects.streams import Show
from gateway.dialects.token_generation import token_id_of
from gateway.fleet.fleet import Fleet

_SAME_NAME = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    }
)  # fmt: skip
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
# SGLang's defaults. /v1/completions takes missing ones from the model's generation_config.json.
_DEFAULTS: Json = {
    "max_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
_WHOLE_VOCABULARY = 1 << 30  # SGLang's top_k for no limit

_PROMPT = ("text", "input_ids")
_READ = frozenset(
    {
        *_PROMPT, "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_prompt_token_ids", "extra_key", "lora_path", "log_metrics", "session_id", "user",
    }
)  # fmt: skip
# Fields of the gateway and of vLLM, passed to the completions unchanged.
_PASSED = ("model", "priority", "min_version", "max_staleness")
_SHORT_TOKENS = 128  # a sample as short as this is repeated with each chunk
_GROWTH = 1 / 32

Task = asyncio.Task[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in vLLM's words: `body` is a body of its completions."""

    rid: str
    body: Json
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    return_prompt_token_ids: bool
    no_tokens: bool
    """True for max_new_tokens = 0: only the prompt is scored. vLLM makes at least one token, which is left out."""

    @property
    def scores_prompt(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0


def read_asked(body: Json, request_id: str) -> Asked:
    """Return what a body asks for. Raise `InvalidRequest`."""
    for key, value in body.items():
        if key not in _READ and key not in _PASSED and value not in (None, False, "", [], {}, -1):
            raise InvalidRequest(f"{key} = {shown(value)} has no meaning here: leave it out", param=key)
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise InvalidRequest(f"sampling_params is {type(sampling).__name__}, no object", param="sampling_params")
    start, top = (body.get(key) for key in ("logprob_start_len", "top_logprobs_num"))
    start, top = -1 if start is None else start, 0 if top is None else top
    for key, value, least in (("logprob_start_len", start, -1), ("top_logprobs_num", top, 0)):
        if type(value) is not int or value < least:
            raise InvalidRequest(f"{key} = {shown(value)} must be a whole number of at least {least}", param=key)
    if "max_new_tokens" in sampling and sampling["max_new_tokens"] is None:
        raise InvalidRequest("max_new_tokens = None: say how many, or leave it out for 128", param="max_new_tokens")
    no_tokens = type(sampling.get("max_new_tokens")) is int and sampling["max_new_tokens"] == 0
    wanted: Json = {key: body[key] for key in _PASSED if body.get(key) is not None}
    wanted |= _sampling(sampling | {"max_new_tokens": 1} if no_tokens else sampling)
    wanted |= {"prompt": _prompt(body), "return_token_ids": True, "stream": bool(body.get("stream"))}
    if body.get("lora_path"):
        wanted["model"] = body["lora_path"]
    if body.get("extra_key") is not None:
        wanted["cache_salt"] = body["extra_key"]
    asked = Asked(
        rid=check_id(body["rid"], "rid") if body.get("rid") is not None else request_id,
        body=wanted,
        return_logprob=bool(body.get("return_logprob")),
        logprob_start_len=start,
        top_logprobs_num=top,
        return_prompt_token_ids=bool(body.get("return_prompt_token_ids")),
        no_tokens=no_tokens,
    )
    if asked.return_logprob:
        wanted |= {"logprobs": top, "return_tokens_as_token_ids": True}
    if asked.scores_prompt:
        wanted["prompt_logprobs"] = top
        if body.get("stream"):
            raise InvalidRequest(
                "logprob_start_len with stream: log-probs of the prompt come only with whole replies; leave one out",
                param="logprob_start_len",
            )
    return asked


def answer(asked: Asked, choice: Json, usage: Json | None, seconds: float) -> Json:
    """Return a choice of /v1/completions as /generate reports it: text and ids from the start of the sample."""
    token_ids: list[int] = [] if asked.no_tokens else choice["token_ids"] or []
    prompt_ids: list[int] = choice.get("prompt_token_ids") or []
    meta: Json = {
        "id": asked.rid,
        "finish_reason": _finish(asked, choice, token_ids),
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(token_ids),
        **_weights(choice),
        "e2e_latency": seconds,
    }
    cached = ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        meta["cached_tokens"] = cached
    if asked.return_logprob:
        meta |= _input_logprobs(asked, choice.get("prompt_logprobs") or (), prompt_ids)
        meta |= _output_logprobs(asked, choice, token_ids)
    reported: Json = {"text": "" if asked.no_tokens else choice["text"], "output_ids": token_ids, "meta_info": meta}
    return reported | {"prompt_token_ids": prompt_ids} if asked.return_prompt_token_ids else reported


def aborted_reply(n: int, version: int) -> Json:
    """Return the reply of /v1/completions to a prompt that was aborted before it had tokens."""
    choice: Json = {"text": "", "token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_version": version}
    return {"choices": [dict(choice) for _ in range(n)]}


def _sampling(sampling: Json) -> Json:
    wanted, grammar = dict(_DEFAULTS), {}
    for key, value in sampling.items():
        if key in _SAME_NAME or key in _RENAMED:
            if value is not None:
                wanted[_RENAMED.get(key, key)] = value
        elif key in _GRAMMARS:
            if value is not None:
                grammar[_GRAMMARS[key]] = value
        elif value not in (None, False, "", [], {}):
            raise InvalidRequest(f"sampling_params.{key} = {shown(value)} has no meaning here: leave it out", param=key)
    if wanted["top_k"] == -1 or (type(wanted["top_k"]) is int and wanted["top_k"] >= _WHOLE_VOCABULARY):
        wanted["top_k"] = 0
    return wanted | {"structured_outputs": grammar} if grammar else wanted


def _prompt(body: Json) -> Any:
    given = [key for key in _PROMPT if body.get(key) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{' and '.join(given) or 'neither text nor input_ids'} given: send one of text and input_ids",
            param=given[-1] if given else "input_ids",
        )
    [field], prompt = given, body[given[0]]
    is_right = isinstance(prompt, str) if field == "text" else isinstance(prompt, list)
    if not is_right or not prompt or (field == "input_ids" and type(prompt[0]) is not int):
        kind = "text" if field == "text" else "a list of token ids"
        raise InvalidRequest(
            f"{field} = {shown(prompt)} must be {kind}, and not empty: send a request for each prompt", param=field
        )
    return prompt


def _finish(asked: Asked, choice: Json, token_ids: Sequence[int]) -> Json | None:
    if asked.no_tokens:
        return {"type": "length", "length": 0}
    match choice.get("finish_reason"):
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case reason:
            # vLLM reports no stop_reason for the end-of-sequence token, which is the last token then.
            stop = choice.get("stop_reason")
            return {"type": reason, "matched": token_ids[-1] if stop is None and token_ids else stop}


def _weights(choice: Json) -> Json:
    """Return the version that ended the sample, as SGLang does, and its spans, as SGLang does from 0.5.23 on."""
    spans = choice.get("weight_versions")
    version = spans[-1]["version"] if spans else choice.get("weight_version")
    reported: Json = {"weight_version": str(version)}
    marks = ("weight_versions", "kv_versions", "resumed", "missing_logprobs")
    return reported | {key: choice[key] for key in marks if choice.get(key)}


def _output_logprobs(asked: Asked, choice: Json, token_ids: Sequence[int]) -> Json:
    logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
    chosen = [[value, token_id, None] for value, token_id in zip(logprobs["token_logprobs"], token_ids, strict=False)]
    meta: Json = {"output_token_logprobs": chosen}
    if asked.top_logprobs_num:
        tops = logprobs["top_logprobs"][: len(chosen)]
        meta["output_top_logprobs"] = [
            _likeliest({token_id_of(name): value for name, value in top.items()}, asked.top_logprobs_num)
            for top in tops
        ]
    return meta


def _input_logprobs(asked: Asked, scored: Sequence[Json | None], prompt_ids: Sequence[int]) -> Json:
    """Return log-probs from logprob_start_len on; none without it. The first token of a prompt has None."""
    chosen, tops = [], []
    start = asked.logprob_start_len if asked.scores_prompt else len(prompt_ids)
    for token_id, entry in list(zip(prompt_ids, scored, strict=False))[start:]:
        values = {int(key): scored_token["logprob"] for key, scored_token in (entry or {}).items()}
        chosen.append([values.get(token_id), token_id, None])
        tops.append(_likeliest(values, asked.top_logprobs_num) if entry else None)
    meta: Json = {"input_token_logprobs": chosen}
    return meta | {"input_top_logprobs": tops} if asked.top_logprobs_num else meta


def _likeliest(values: dict[int, float | None], count: int) -> list[list[Any]]:
    """Return the likeliest tokens. An engine writes minus infinity as null: a token that a grammar rules out."""
    ranked = sorted(values.items(), key=lambda item: -math.inf if item[1] is None else item[1], reverse=True)
    return [[value, token_id, None] for token_id, value in ranked[:count]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A prompt of `client`. The reply is a list if it has several samples."""

    client: str
    asked: Asked
    prompt: CompletionPrompt


class SglangGenerate:
    """Translates SGLang's bodies for `Completions`."""

    def __init__(self, completions: Completions, fleet: Fleet) -> None:
        self._completions = completions
        self._fleet = fleet
        self._running: defaultdict[tuple[str, str], set[Task]] = defaultdict(set)  # by client and id

    def abort(self, client: str, rid: str) -> None:
        """Abort the client's requests of an id. Whole replies have no tokens then; streams keep theirs."""
        for task in self._running.get((client, rid), ()):
            task.cancel()

    def decode(self, body: Json, request_id: str, session: str = "", client: str = "") -> Generation:
        """Return what a body asks for. Raise `InvalidRequest` before any replica has work."""
        asked = read_asked(body, request_id)
        [prompt] = self._completions.decode(asked.body, asked.rid, session)
        return Generation(client=client, asked=asked, prompt=prompt)

    async def generate(self, given: Generation) -> tuple[Json | list[Json], Json]:
        """Return the reply and its usage."""
        began = time.monotonic()
        with self._begun(given, self._completions.generate([given.prompt])) as task:
            await asyncio.wait([task])
        reply = aborted_reply(given.prompt.rollout.n, self._fleet.version) if task.cancelled() else task.result()
        seconds, usage = time.monotonic() - began, reply.get("usage")
        answers = [answer(given.asked, choice, usage, seconds) for choice in reply["choices"]]
        return answers if given.prompt.rollout.n > 1 else answers[0], usage or {}

    @contextmanager
    def _begun(self, given: Generation, work: Coroutine[Any, Any, Any]) -> Iterator[Task]:
        """Have work run as a task, which an abort of the request's id cancels, and the end of the block."""
        task, name = asyncio.create_task(work), (given.client, given.asked.rid)
        self._running[name].add(task)
        try:
            yield task
        finally:
            task.cancel()
            self._running[name].discard(task)
            if not self._running[name]:
                del self._running[name]

    async def stream(self, given: Generation, usages: list[Json], show: Show) -> None:
        """Show chunks that repeat each sample from its start, as SGLang's do; `index` numbers several samples.

        A long sample is repeated when it has grown by 1/32: each token would else cost as much as all before it.
        """
        began, samples = time.monotonic(), [Sample(index) for index in range(given.prompt.rollout.n)]
        repeated = [0] * len(samples)

        def repeat(sample: Sample) -> None:
            repeated[sample.index] = sample.num_made
            reply = answer(given.asked, _so_far(sample), None, time.monotonic() - began)
            show(reply | {"index": sample.index} if given.prompt.rollout.n > 1 else reply)

        def take(chunk: Json) -> None:
            for choice in chunk["choices"]:
                sample = samples[choice["index"]]
                sample.add_told(choice)
                is_long = sample.num_made > _SHORT_TOKENS
                if not (sample.is_open and is_long and sample.num_made < repeated[sample.index] * (1 + _GROWTH)):
                    repeat(sample)

        with self._begun(given, self._completions.stream([given.prompt], usages, take)) as task:
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            return
        for sample in samples:
            if sample.is_open:
                sample.end("abort", self._fleet.version)
                repeat(sample)


def _so_far(sample: Sample) -> Json:
    """The choice with all that it has so far."""
    whole = sample.whole
    joined = {"text": whole.text or "", "token_ids": sample.token_ids, "logprobs": whole.scores}
    told: Json = opened(sample.last | joined | {"prompt_token_ids": sample.prompt and decoded(sample.prompt)})
    return told
