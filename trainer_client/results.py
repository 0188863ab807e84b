"""What comes back: completions as arrays, each with the weights that made it, and the rollouts that they belong to."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineFailed

Json = dict[str, Any]


class Outcome(StrEnum):
    """What became of a rollout."""

    DELIVERED = "delivered"
    FAILED = "failed"  # its `error` says why
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` up to `end` were made with weights `version`.

    `start` and `end` are None where an update fell into the completion and the engine does not report the token.
    """

    version: int
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample of one prompt. `token_ids` is int32, `logprobs` float32 of the same length: that of each token at the
    temperature asked, as the engine drew it, or None where they were not asked for. `finish_reason` is "stop", "length"
    or "abort". `spans` is empty where the server tells no weight versions, as vLLM alone does. `kv_versions` are the
    versions that wrote the KV under its last token, oldest first: more than one where an update kept that of older
    weights."""

    prompt_index: int
    sample_index: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    text: str
    finish_reason: str
    spans: tuple[WeightSpan, ...]
    kv_versions: tuple[int, ...] = ()

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that made any of its tokens: what its staleness is counted from."""
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One prompt with its completions, in the order of their `sample_index`; none unless `outcome` is DELIVERED.

    `prompt_token_ids` (int32) is what the engine read, also where text was sent. `attempts` counts the requests made.
    """

    request_id: str
    prompt_index: int
    outcome: Outcome
    prompt_token_ids: NDArray[np.int32] | None = None
    completions: tuple[Completion, ...] = ()
    attempts: int = 1
    error: Exception | None = None


def read_rollout(reply: Json, request_id: str, prompt_index: int, n: int, *, attempts: int) -> Rollout:
    """The rollout in a reply of /v1/completions to one prompt. Raises `EngineFailed` where the reply is not whole."""
    choices = sorted(reply.get("choices") or (), key=lambda choice: int(choice["index"]))
    if len(choices) != n:
        raise EngineFailed(f"{n} completions were asked for, and {len(choices)} came")
    prompt_token_ids = choices[0].get("prompt_token_ids")
    return Rollout(
        request_id=request_id,
        prompt_index=prompt_index,
        outcome=Outcome.DELIVERED,
        prompt_token_ids=None if prompt_token_ids is None else np.asarray(prompt_token_ids, np.int32),
        completions=tuple(_read_completion(choice, prompt_index, index) for index, choice in enumerate(choices)),
        attempts=attempts,
    )


def _read_completion(choice: Json, prompt_index: int, sample_index: int) -> Completion:
    if choice.get("token_ids") is None:
        raise EngineFailed("the reply has no token_ids, which were asked for: the server is no vLLM and no SGLang")
    token_ids = np.asarray(choice["token_ids"], np.int32)
    logprobs = None
    if (told := choice.get("logprobs")) is not None:
        # As float64 first: None, which JSON has in the place of NaN, becomes NaN there.
        logprobs = np.asarray(told["token_logprobs"], np.float64).astype(np.float32)
        if len(logprobs) != len(token_ids):
            raise EngineFailed(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=token_ids,
        logprobs=logprobs,
        text=choice.get("text") or "",
        finish_reason=choice.get("finish_reason") or "abort",
        spans=tuple(
            WeightSpan(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or ()
        ),
        kv_versions=tuple(choice.get("kv_versions") or ()),
    )
