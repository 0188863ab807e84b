"""What a break does to a completion, by the fields of its request: the table in docs/design/rollouts.md.

A break is a death or a standstill. The completion then continues on any replica from its
tokens, which are read as the end of the prompt, or it restarts from the prompt.
"""

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engines.engine import Json

MARK = "resumed"
"""The field of a choice that names the request's fields with which its continuation is not exact."""

_LONGEST_CHARACTER = 4  # bytes, each of which may be a token
_HALF = "\N{REPLACEMENT CHARACTER}"
_OF_THE_WHOLE = ("max_completion_tokens", "min_tokens", "request_id")


class Outcome(StrEnum):
    """The effect of a break."""

    CONTINUED = "continued"  # as if there had been no break
    MARKED = "continued and marked"
    RESTARTED = "restarted"


@dataclass(frozen=True, slots=True)
class Feature:
    """Fields of a request with one outcome; `neutral` are values that ask for nothing."""

    fields: tuple[str, ...]
    outcome: Outcome
    reason: str
    neutral: tuple[Any, ...] = ()


_AS_A_WHOLE = "the reply is about prompt and completion as a whole"
FEATURES = (
    Feature(
        ("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos"),
        Outcome.CONTINUED,
        "the next token depends on the tokens alone",
    ),
    Feature(
        ("max_tokens", "max_completion_tokens", "min_tokens"),
        Outcome.CONTINUED,
        "the rest has what is left of them",
    ),
    Feature(("n",), Outcome.CONTINUED, "each sample continues by itself"),
    Feature(
        ("logprobs", "return_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output", "detokenize",
         "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        Outcome.CONTINUED,
        "both parts are joined token by token",
    ),
    Feature(
        ("model", "prompt", "add_special_tokens", "stream", "stream_options", "stream_interval", "cache_salt",
         "priority", "request_id", "skip_clone", "user", "session_id", "prompt_cache_key"),
        Outcome.CONTINUED,
        "no part in the sampling",
    ),
    Feature(
        ("seed",),
        Outcome.MARKED,
        "the rest draws with a seed made of this one and the tokens so far: random, but not as without the break",
    ),
    Feature(
        ("presence_penalty", "frequency_penalty"),
        Outcome.MARKED,
        "engines count the tokens that they made themselves, so the counts start again",
        (0,),
    ),
    Feature(
        ("repetition_penalty",),
        Outcome.MARKED,
        "engines differ in their count of the prompt, of which the first part is the end now",
        (1,),
    ),
    Feature(("bad_words",), Outcome.MARKED, "a bad word may lie across the seam", ([],)),
    Feature(("stop",), Outcome.RESTARTED, "a stop string may lie across the seam", ([],)),
    Feature(
        ("structured_outputs", "response_format"),
        Outcome.RESTARTED,
        "a grammar does not know where it stopped",
        ({"type": "text"},),
    ),
    Feature(
        ("logits_processors", "vllm_xargs", "thinking_token_budget", "repetition_detection"),
        Outcome.RESTARTED,
        "a processor of the engine has a state that no prompt restores",
    ),
    Feature(
        ("echo", "use_beam_search", "skip_reading_prefix_cache"), Outcome.RESTARTED, _AS_A_WHOLE, (False,)
    ),
    Feature(("best_of", "length_penalty"), Outcome.RESTARTED, _AS_A_WHOLE, (1,)),
    Feature(("suffix",), Outcome.RESTARTED, _AS_A_WHOLE, ("",)),
    Feature(("prompt_logprobs",), Outcome.RESTARTED, _AS_A_WHOLE),
)  # fmt: skip

_BY_FIELD = {field: feature for feature in FEATURES for field in feature.fields}


def inexact_fields(body: Json) -> tuple[str, ...] | None:
    """The fields of a body that mark its continuation; None if it has to restart. A field unknown here restarts it."""
    marks = []
    for field, value in body.items():
        outcome = _outcome(field, value, body)
        if outcome is Outcome.RESTARTED:
            return None
        if outcome is Outcome.MARKED:
            marks.append(field)
    return tuple(marks)


def later_seed(seed: int, made: Sequence[int]) -> int:
    """The seed of the rest after the tokens `made`: with the same seed it would draw the same numbers again."""
    return zlib.crc32(f"{seed}{list(made)}".encode()) >> 1  # SGLang's seeds have 31 bits


def is_greedy(sampling: Json) -> bool:
    """True at temperature 0 alone: vLLM raises a smaller one than 0.01 to that, and draws."""
    return bool(sampling.get("temperature") == 0)


def _outcome(field: str, value: Any, body: Json) -> Outcome:
    feature = _BY_FIELD.get(field)
    if value is None or (feature and value in feature.neutral) or (field == "seed" and is_greedy(body)):
        return Outcome.CONTINUED
    return feature.outcome if feature else Outcome.RESTARTED


def rest_sampling(sampling: Json, made: Sequence[int], index: int) -> Json:
    """The sampling parameters that continue sample `index` of a group after the generated tokens `made`."""
    limit, least = sampling.get("max_tokens"), max(0, (sampling.get("min_tokens") or 0) - len(made))
    rest = {key: value for key, value in sampling.items() if key not in _OF_THE_WHOLE}
    limits = ({} if limit is None else {"max_tokens": limit - len(made)}) | ({"min_tokens": least} if least else {})
    return rest | {"n": 1} | limits | _rest_seed(sampling, made, index)


def _rest_seed(sampling: Json, made: Sequence[int], index: int) -> Json:
    """The seed of one sample's rest, if it has one: vLLM draws sample `index` of a group with `seed + index`."""
    if sampling.get("seed") is None or is_greedy(sampling):
        return {}
    seed = sampling["seed"] + index
    return {"seed": later_seed(seed, made) if made else seed}


async def whole_characters(token_ids: list[int], detokenize: Callable[[list[int]], Awaitable[str]]) -> list[int]:
    """These tokens without an incomplete character at their end.

    Engines report a character with its last byte, and would never report a character that began in the prompt.
    """
    for dropped in range(min(_LONGEST_CHARACTER, len(token_ids))):
        kept = token_ids[: len(token_ids) - dropped]
        if not (await detokenize(kept[-_LONGEST_CHARACTER:])).endswith(_HALF):
            return kept
    return token_ids  # the model wrote an invalid character
