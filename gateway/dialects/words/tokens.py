"""Translates /inference/v1/generate into /v1/completions, for engines without that route, and back. Pure."""

import time
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest
from engines.raw_json import opened
from engines.types import ReplicaInfo

# The fields of vLLM's SamplingParams that /v1/completions has too, by the same name.
_SAME_NAME = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
        "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs",
        "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "structured_outputs", "detokenize",
    }
)  # fmt: skip
# /v1/completions takes these, where they are missing, from the model's generation_config.json.
_DEFAULTS: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PASSED = ("model", "cache_salt", "priority", "stream_options", "session_id")


def completion_body(body: Json, info: ReplicaInfo) -> Json:
    """Return the body for /v1/completions of the replica `info`. Raise `InvalidRequest` for a parameter it lacks."""
    sampling = {key: value for key, value in body["sampling_params"].items() if value is not None}
    for key in sampling:
        if key not in _SAME_NAME:
            raise InvalidRequest(
                f"sampling_params.{key}: replica {info.replica_id} runs {info.kind} {info.engine_version}, which lacks "
                "/inference/v1/generate, and /v1/completions has no such parameter: leave it out",
                param=key,
            )
    if body.get("output_mode", "tokens") == "text" and sampling.get("logprobs") is not None:
        raise InvalidRequest(
            f"output_mode = 'text' with logprobs needs /inference/v1/generate, which {info.kind} {info.engine_version} "
            f"of replica {info.replica_id} lacks: leave one of them out",
            param="output_mode",
        )
    room = None if info.max_model_len is None else info.max_model_len - len(body["token_ids"])
    limit = {} if room is None else {"max_tokens": room}
    passed = {key: body[key] for key in _PASSED if body.get(key) is not None}
    return {
        **passed,
        **_DEFAULTS,
        **limit,
        **sampling,
        "prompt": body["token_ids"],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def token_reply(answer: Json, body: Json) -> Json:
    """Return a reply of /v1/completions in the form of /inference/v1/generate."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return {
        "request_id": body["request_id"],
        "model": answer.get("model"),
        "created": answer.get("created") or int(time.time()),
        "output_mode": body.get("output_mode") or "tokens",
        "choices": [_choice(choice, body) for choice in choices],
        "usage": answer.get("usage"),
        "prompt_logprobs": choices[0].get("prompt_logprobs"),
        "prompt_token_ids": body["token_ids"] if body.get("return_token_ids") else None,
    }


def token_chunk(chunk: Json, body: Json) -> Json:
    """Return a chunk of a stream of /v1/completions in the form of /inference/v1/generate."""
    reply: Json = {"request_id": body["request_id"], "output_mode": body.get("output_mode") or "tokens"}
    reply["choices"] = [_choice(choice, body) for choice in chunk["choices"]]
    if body.get("return_token_ids") and any(choice.get("prompt_token_ids") for choice in chunk["choices"]):
        reply["prompt_token_ids"] = body["token_ids"]
    return reply | {"usage": chunk.get("usage")}


def _choice(choice: Json, body: Json) -> Json:
    reply: Json = {
        "index": choice["index"],
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids"),
        "logprobs": {"content": _logprobs(choice)} if choice.get("logprobs") else None,
        "weight_versions": choice.get("weight_versions"),
    }
    return reply | {"text": choice["text"]} if body.get("output_mode") == "text" else reply


def _logprobs(choice: Json) -> list[Json]:
    """Return an entry for each token: its log-prob, and candidates in the engine's order, the token itself first."""
    logprobs = opened(choice["logprobs"])
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["token_logprobs"])
    return [
        {"token_id": token_id, "logprob": logprob, "rank": None, "top_logprobs": _candidates(top)}
        for token_id, logprob, top in zip(choice["token_ids"], logprobs["token_logprobs"], tops, strict=True)
    ]


def _candidates(top: dict[str, Any] | None) -> list[Json]:
    return [{"token_id": token_id_of(name), "logprob": value, "rank": None} for name, value in (top or {}).items()]


def token_id_of(name: str) -> int:
    """Return the id of a token that is named by it, as in `token_id:7`."""
    return int(name.removeprefix("token_id:"))
