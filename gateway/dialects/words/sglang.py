"""Translates a body of SGLang's /generate into vLLM's completions, prompt by prompt, and the choices back. Pure.

    SGLang                                        vLLM
    text, input_ids (one or a list)               prompt
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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.dialects.sampling import check_id
from gateway.dialects.words.tokens import token_id_of

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
        "expected_tokens",
    }
)  # fmt: skip
# Fields with a value for all prompts, or a list with a value for each.
_DEFAULT_OF: Json = {
    "sampling_params": None, "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0,
    "return_prompt_token_ids": False, "extra_key": None, "lora_path": None, "expected_tokens": None,
}  # fmt: skip
# Fields of the gateway and of vLLM, passed to the completions unchanged.
_PASSED = ("model", "priority", "min_version", "max_staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request of one prompt of a body. `body` is a body of vLLM's completions."""

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


def asked_prompts(body: Json, request_id: str) -> tuple[list[Asked], bool]:
    """Return the prompts of a body, and True if they came as a list. Raise `InvalidRequest`."""
    for key, value in body.items():
        if key not in _READ and key not in _PASSED and value not in (None, False, "", [], {}, -1):
            raise InvalidRequest(f"{key} = {shown(value)} has no meaning here: leave it out", param=key)
    field = _prompt_field(body)
    prompts, is_batch = _prompts(field, body[field])
    count = len(prompts)
    each = {key: _each(body, key, default, count) for key, default in _DEFAULT_OF.items()}
    rids = _rids(body.get("rid"), request_id, count, is_batch)
    asked = []
    for index, prompt in enumerate(prompts):
        own = {key: values[index] for key, values in each.items()}
        asked.append(_asked(body, prompt, rids[index], own))
    if any(prompt.body.get("n", 1) != asked[0].body.get("n", 1) for prompt in asked):
        raise InvalidRequest("sampling_params.n must be the same for all prompts of a batch", param="n")
    return asked, is_batch


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


def _asked(body: Json, prompt: Any, rid: str, own: Json) -> Asked:
    sampling = own["sampling_params"] or {}
    if not isinstance(sampling, dict):
        raise InvalidRequest(f"sampling_params is {type(sampling).__name__}, no object", param="sampling_params")
    start, top = own["logprob_start_len"], own["top_logprobs_num"]
    start, top = -1 if start is None else start, 0 if top is None else top
    for key, value, least in (("logprob_start_len", start, -1), ("top_logprobs_num", top, 0)):
        if type(value) is not int or value < least:
            raise InvalidRequest(f"{key} = {shown(value)} must be a whole number of at least {least}", param=key)
    if "max_new_tokens" in sampling and sampling["max_new_tokens"] is None:
        raise InvalidRequest("max_new_tokens = None: say how many, or leave it out for 128", param="max_new_tokens")
    no_tokens = type(sampling.get("max_new_tokens")) is int and sampling["max_new_tokens"] == 0
    wanted: Json = {key: body[key] for key in _PASSED if body.get(key) is not None}
    wanted |= _sampling(sampling | {"max_new_tokens": 1} if no_tokens else sampling)
    wanted |= {"prompt": prompt, "return_token_ids": True, "stream": bool(body.get("stream"))}
    if own["lora_path"]:
        wanted["model"] = own["lora_path"]
    if own["extra_key"] is not None:
        wanted["cache_salt"] = own["extra_key"]
    if own["expected_tokens"] is not None:
        wanted["expected_tokens"] = own["expected_tokens"]
    asked = Asked(
        rid=rid,
        body=wanted,
        return_logprob=bool(own["return_logprob"]),
        logprob_start_len=start,
        top_logprobs_num=top,
        return_prompt_token_ids=bool(own["return_prompt_token_ids"]),
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


def _prompt_field(body: Json) -> str:
    given = [key for key in _PROMPT if body.get(key) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"{' and '.join(given) or 'neither text nor input_ids'} given: send one of text and input_ids",
            param=given[-1] if given else "input_ids",
        )
    return given[0]


def _prompts(field: str, value: Any) -> tuple[list[Any], bool]:
    """Return the prompts, and True if they are a batch."""
    single = str if field == "text" else int
    if field == "text" and isinstance(value, str):
        return [value], False
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{field} = {shown(value)} is no prompt and no list of prompts", param=field)
    if field == "input_ids" and type(value[0]) is int:
        return [value], False
    for index, prompt in enumerate(value):
        is_right = isinstance(prompt, str) if single is str else isinstance(prompt, list)
        if not is_right or not prompt:
            kind = "text" if single is str else "a list of token ids"
            raise InvalidRequest(f"{field}[{index}] = {shown(prompt)} must be {kind}, and not empty", param=field)
    return value, True


def _each(body: Json, key: str, default: Any, count: int) -> list[Any]:
    """Return the value of `key` for each prompt, from a value for all or a list."""
    value = body.get(key, default)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{key} has {len(value)} entries for {count} prompts", param=key)
    return value


def _rids(rid: Any, request_id: str, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [f"{request_id}-{index}" for index in range(count)] if is_batch else [request_id]
    rids = [rid] if isinstance(rid, str) else rid
    if (
        not isinstance(rids, list)
        or not all(isinstance(name, str) and name for name in rids)
        or len(set(rids)) != count
    ):
        raise InvalidRequest(f"rid = {shown(rid)} must be a name for each of {count} prompts", param="rid")
    return [check_id(name, "rid") for name in rids]


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
