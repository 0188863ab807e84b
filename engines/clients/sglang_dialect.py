"""Pure translation between vLLM's completions of one prompt and SGLang's /generate.

    vLLM                                       SGLang
    prompt (text, token ids)                   text, input_ids
    max_tokens (default 16), min_tokens        max_new_tokens, min_new_tokens
    seed                                       sampling_seed; needs enable_deterministic_inference
    top_k 0 or -1                              left out
    structured_outputs regex, json, grammar    regex, json_schema, ebnf
    include_stop_str_in_output                 no_stop_trim
    cache_salt                                 extra_key
    logprobs k                                 return_logprob, top_logprobs_num k
    prompt_logprobs k                          the same, logprob_start_len 0
    return_token_ids                           output_ids and return_prompt_token_ids; for a chat, which is then
                                               not streamed, response_token_ids

Unknown fields are refused: SGLang would silently ignore some.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engines.clients.http import error_of
from engines.engine import Json
from engines.errors import InvalidRequest, shown

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_SAME_NAME = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    }
)  # fmt: skip
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_new_tokens", "sampling_seed",
)  # fmt: skip
_GRAMMARS = {"regex": "regex", "json": "json_schema", "grammar": "ebnf"}
_HANDLED_ELSEWHERE = frozenset(
    {
        "prompt", "model", "stream", "stream_options", "logprobs", "prompt_logprobs", "return_token_ids",
        "return_tokens_as_token_ids", "cache_salt", "structured_outputs", "request_id", "user", "priority",
        "session_id", "prompt_cache_key",
    }
)  # fmt: skip
# Fields that SGLang lacks, with the value that means the default; any other value is refused.
_NEUTRAL: dict[str, Any] = {
    "echo": False, "best_of": 1, "use_beam_search": False, "suffix": "", "add_special_tokens": True,
    "detokenize": True, "truncate_prompt_tokens": -1, "bad_words": [], "allowed_token_ids": [],
}  # fmt: skip
_DEFAULT_MAX_TOKENS = 16
_OF_TOKENS = ("output_token_logprobs", "output_top_logprobs")


def generate_body(body: Json) -> Json:
    """Return the body of /generate. Raise `InvalidRequest` for fields that SGLang lacks."""
    asked: Json = {"sampling_params": _sampling(body), "return_prompt_token_ids": bool(body.get("return_token_ids"))}
    prompt = body.get("prompt")
    asked["text" if isinstance(prompt, str) else "input_ids"] = prompt
    if (salt := body.get("cache_salt")) is not None:
        asked["extra_key"] = salt
    counts = [count for key in ("logprobs", "prompt_logprobs") if (count := body.get(key)) is not None]
    if counts:
        asked |= {"return_logprob": True, "top_logprobs_num": _top_count(counts)}
    if body.get("prompt_logprobs") is not None:
        asked["logprob_start_len"] = 0
    return asked


@dataclass(slots=True)
class _Sample:
    """The part of a sample that has come."""

    characters: int = 0
    tokens: int = 0
    shows_prompt: bool = False

    def add(self, answer: Json) -> Json:
        """Return the answer with new text and tokens alone: chunks of a server that was started without
        `incremental_streaming_output` repeat their sample from the start.

        Raise `ValueError` if the tokens so far are not as many as SGLang counts.
        """
        count, num_told = answer["meta_info"]["completion_tokens"], len(answer["output_ids"])
        num_new = count - self.tokens
        if _is_aborted(answer):
            # A request that was aborted in SGLang's queue ends with the whole text, and its last id again.
            new = answer if 0 < num_told == num_new else _part(answer, "", slice(0))
        elif num_told > num_new:  # it may have ids that were added after the count
            new = _part(answer, answer["text"][self.characters :], slice(self.tokens, count))
        else:
            new = answer
        self.characters += len(new["text"])
        self.tokens += len(new["output_ids"])
        if self.tokens != count and not _is_aborted(answer):
            raise ValueError(f"its chunks have {self.tokens} tokens of a sample, and it counts {count}")
        return new


class CompletionReply:
    """Translates SGLang's answers to one body into vLLM's form.

    replica_id: the server, for errors.
    """

    def __init__(self, body: Json, *, replica_id: str = "") -> None:
        self._body = body
        self._replica_id = replica_id
        self._envelope: Json = {"id": "", "object": "text_completion", "created": int(time.time())}
        self._envelope["model"] = body.get("model")
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._prompt_tokens = self._cached_tokens = 0

    def whole(self, answer: Json) -> Json:
        answers = answer.get("value", [answer])  # a list if n > 1
        choices = []
        for index, sample in enumerate(answers):
            choice = self._choice(index, self._samples[index].add(sample))
            choices.append(choice | {"prompt_logprobs": self._prompt_logprobs(sample["meta_info"])})
            self._count_prompt(sample["meta_info"])
        return {**self._identified(answers[0]), "choices": choices, "usage": self.usage()}

    def chunk(self, answer: Json) -> Json | None:
        """Return the new part of a streamed answer; None where there is none.

        Raise `EngineRefused` or `EngineFailed` if SGLang has given the request up. A whole reply then has an HTTP
        status instead.
        """
        if _is_aborted(answer):
            self._check_status(answer["meta_info"]["finish_reason"])
        index = answer.get("index", 0)
        sample = self._samples[index]
        choice = self._choice(index, sample.add(answer))
        self._count_prompt(answer["meta_info"])
        if not choice["text"] and choice["finish_reason"] is None and not choice["token_ids"]:
            return None
        if sample.shows_prompt:
            choice["prompt_token_ids"] = None
        sample.shows_prompt |= choice["prompt_token_ids"] is not None
        return {**self._identified(answer), "choices": [choice]}

    def last(self) -> Json:
        """Return the final chunk, which has only the usage."""
        return {**self._envelope, "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        completion_tokens = sum(sample.tokens for sample in self._samples.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _check_status(self, reason: Json) -> None:
        """Raise if an abort has the status of an error. That by a client or an update has none."""
        if (status := reason.get("status_code")) is not None:
            message = str(reason.get("message"))
            body = error_body(message, status, None)
            raise error_of(status, f"it ended a sample with {status}: {message}", body, self._replica_id)

    def _identified(self, answer: Json) -> Json:
        self._envelope["id"] = f"cmpl-{answer['meta_info']['id']}"
        return self._envelope

    def _count_prompt(self, meta: Json) -> None:
        # Missing if a request was aborted in the queue.
        self._prompt_tokens = meta.get("prompt_tokens") or self._prompt_tokens
        self._cached_tokens = meta.get("cached_tokens") or 0

    def _choice(self, index: int, answer: Json) -> Json:
        meta, wants_ids = answer["meta_info"], self._body.get("return_token_ids")
        reason, stop = _finish(meta.get("finish_reason"), self._body.get("stop_token_ids") or [])
        choice: Json = {
            "index": index,
            "text": answer["text"],
            "token_ids": answer["output_ids"] if wants_ids else None,
            "prompt_token_ids": (answer.get("prompt_token_ids") or self._prompt_ids()) if wants_ids else None,
            "logprobs": self._logprobs(meta) if self._body.get("logprobs") is not None else None,
            "finish_reason": reason,
            "stop_reason": stop,
        }
        if reason and (spans := meta.get("weight_versions")):
            choice["weight_versions"] = [_span(span) for span in spans]
        return choice

    def _prompt_ids(self) -> list[int] | None:
        prompt = self._body["prompt"]
        return prompt if isinstance(prompt, list) else None

    def _logprobs(self, meta: Json) -> Json:
        count = self._body["logprobs"]
        chosen = meta.get("output_token_logprobs", [])
        tops = meta.get("output_top_logprobs") or [None] * len(chosen)
        names = [_name(entry) for entry in chosen]
        return {
            "text_offset": _offsets(names),
            "token_logprobs": [entry[0] for entry in chosen],
            "tokens": names,
            "top_logprobs": [
                {_name(entry): entry[0] for entry in (one, *(top or [])[:count])}
                for one, top in zip(chosen, tops, strict=True)
            ],
        }

    def _prompt_logprobs(self, meta: Json) -> list[Json | None] | None:
        """Return teacher-forced log-probs by token id; None for the first token."""
        count = self._body.get("prompt_logprobs")
        if count is None:
            return None
        chosen = meta.get("input_token_logprobs", [])
        tops = meta.get("input_top_logprobs") or [None] * len(chosen)
        return [
            None if one[0] is None else _scored(one, (top or [])[:count]) for one, top in zip(chosen, tops, strict=True)
        ]


def chat_body(body: Json) -> Json:
    """Return the body of SGLang's chat route, which takes vLLM's fields except structured output."""
    if body.get("prompt_logprobs") is not None:
        raise InvalidRequest("SGLang has no prompt_logprobs for chat; leave it out", param="prompt_logprobs")
    rest = {key: value for key, value in body.items() if key not in ("structured_outputs", "prompt_logprobs")}
    grammar = _grammar(body.get("structured_outputs"))
    if (schema := grammar.pop("json_schema", None)) is not None:
        rest["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": json.loads(schema)},
        }
    return rest | grammar


def chat_reply(answer: Json) -> Json:
    """Move the prompt's ids, which SGLang repeats in each choice, to vLLM's place; rename the answer's ids."""
    for choice in answer["choices"]:
        answer["prompt_token_ids"] = choice.pop("prompt_token_ids", answer.get("prompt_token_ids"))
        choice["token_ids"] = choice.pop("response_token_ids", None)
    return answer


def error_body(message: str, status: int, param: str | None) -> Json:
    """Return an error body in vLLM's form."""
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}}


def server_info(info: Json) -> Json:
    """Return the fields of vLLM's /server_info?config_format=json that trainers read."""
    dtype = info.get("dtype") or "auto"
    model_config = {
        "model": info["model_path"],
        "dtype": dtype if dtype == "auto" else f"torch.{dtype}",
        # SGLang's log-probs include temperature, but not top_p and top_k.
        "logprobs_mode": "processed_logprobs",
        "max_model_len": info.get("context_length"),
        "max_logprobs": -1,
    }
    return {
        "vllm_config": {
            "model_config": model_config,
            "parallel_config": {"data_parallel_size": info.get("dp_size", 1), "world_size": world_size(info)},
            "weight_transfer_config": {"backend": "gloo" if info.get("device") == "cpu" else "nccl"},
            "lora_config": None,
        }
    }


def world_size(info: Json) -> int:
    """Return the ranks of one server in a weight group; 0 of several copies, whose workers have the same numbers."""
    return int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)) if info.get("dp_size", 1) == 1 else 0


def _sampling(body: Json) -> Json:
    sampling: Json = {"max_new_tokens": _DEFAULT_MAX_TOKENS}
    for key, value in body.items():
        if value is None or key in _HANDLED_ELSEWHERE:
            continue
        if key in _SAME_NAME or key in _RENAMED:
            sampling[_RENAMED.get(key, key)] = value
        elif key not in _NEUTRAL or value != _NEUTRAL[key]:
            raise InvalidRequest(
                f"SGLang does not support {key} = {shown(value)}: leave it out, or use vLLM", param=key
            )
    _check(sampling)
    if sampling.get("top_k") in (0, -1):
        del sampling["top_k"]  # vLLM's two values for no limit; SGLang refuses 0
    return sampling | _grammar(body.get("structured_outputs"))


def _check(sampling: Json) -> None:
    """Refuse values that vLLM refuses and SGLang does not."""
    for key in _NUMBERS:  # SGLang answers 500 to another type
        if type(sampling.get(key, 0)) not in (int, float):
            asked = next((ours for ours, theirs in _RENAMED.items() if theirs == key), key)
            raise InvalidRequest(f"{asked} must be a number, got {shown(sampling[key])}", param=asked)
    for key in ("n", "max_new_tokens"):  # SGLang answers 0 with nothing
        if type(sampling.get(key, 1)) is not int or sampling.get(key, 1) < 1:
            asked = key.replace("_new_", "_")
            raise InvalidRequest(f"{asked} must be at least 1, got {sampling[key]!r}", param=asked)
    if sampling.get("ignore_eos") and sampling.get("stop_token_ids"):
        raise InvalidRequest(
            "with ignore_eos SGLang also ignores stop_token_ids: leave one of them out", param="stop_token_ids"
        )


def _grammar(wanted: Json | None) -> Json:
    given = {key: value for key, value in (wanted or {}).items() if value is not None}
    for key in given:
        if key not in _GRAMMARS:
            known = ", ".join(_GRAMMARS)
            raise InvalidRequest(f"structured_outputs.{key} is not supported by SGLang, which has {known}", param=key)
    if (schema := given.get("json")) is not None and not isinstance(schema, str):
        given["json"] = json.dumps(schema)
    return {_GRAMMARS[key]: value for key, value in given.items()}


def _top_count(counts: Iterable[Any]) -> int:
    for count in (counts := list(counts)):
        if type(count) is not int or count < 0:
            raise InvalidRequest(
                f"logprobs = {shown(count)}: SGLang needs a whole number of at least 0", param="logprobs"
            )
    return int(max(counts))


def _is_aborted(answer: Json) -> bool:
    return (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort"


def _part(answer: Json, text: str, part: slice) -> Json:
    """Return an answer with this text, and a part of its tokens."""
    meta = answer["meta_info"]
    scores = {key: meta[key][part] for key in _OF_TOKENS if meta.get(key)}
    return answer | {"text": text, "output_ids": answer["output_ids"][part], "meta_info": meta | scores}


def _finish(reason: Json | None, stop_token_ids: list[int]) -> tuple[str | None, Any]:
    """Return vLLM's finish_reason and stop_reason; the latter is None for the end-of-sequence token."""
    if reason is None:
        return None, None
    matched = reason.get("matched")
    return reason["type"], matched if isinstance(matched, str) or matched in stop_token_ids else None


def _span(span: Any) -> Json:
    version, start, end = (span["version"], span["start"], span["end"]) if isinstance(span, dict) else span
    return {"version": str(version), "start": start, "end": end}


def _name(entry: list[Any]) -> str:
    return f"token_id:{entry[1]}"


def _offsets(names: list[str]) -> list[int]:
    offsets = [0]
    for name in names:
        offsets.append(offsets[-1] + len(name))
    return offsets[:-1]


def _scored(one: list[Any], top: list[Any]) -> Json:
    ranks = {entry[1]: rank for rank, entry in enumerate(top, start=1)}
    return {
        str(entry[1]): {"logprob": entry[0], "rank": ranks.get(entry[1]), "decoded_token": entry[2]}
        for entry in (one, *top)
    }
