"""Rollouts and their completions, as arrays with weight versions, and the served weights."""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.errors import EngineFailed
from engines.types import TensorMeta
from trainer_client.http import Json


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens `start` up to `end` were made with weights `version`.

    `start` and `end` are None if an update interrupted the completion and the engine does not report the token.
    """

    version: int
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample of one prompt."""

    prompt_index: int
    sample_index: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    """As many, at the requested temperature, as sampled; None unless requested. NaN for a token for which the engine
    gave none; `missing_logprobs` counts these."""
    text: str
    finish_reason: str
    """One of "stop", "length" and "abort"."""
    spans: tuple[WeightSpan, ...]
    """Empty if the server reports no weight versions, as a plain vLLM."""
    kv_versions: tuple[int, ...] = ()
    """Versions that wrote the KV of its last token, oldest first; several if updates kept older KV."""

    @property
    def missing_logprobs(self) -> int:
        """Tokens whose log-prob is NaN: leave them, or the completion, out of the loss."""
        return 0 if self.logprobs is None else int(np.isnan(self.logprobs).sum())

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of its tokens, from which staleness counts."""
        return min((span.version for span in self.spans), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One prompt with its completions, in order of `sample_index`; none where it failed with `error`."""

    prompt_index: int
    prompt_token_ids: NDArray[np.int32] | None = None
    """The engine's, also for a text prompt."""
    completions: tuple[Completion, ...] = ()
    error: Exception | None = None


class ServedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's weights, as GET /v1/weights tells them."""

    model: str
    tensors: tuple[TensorMeta, ...] | None
    """Checkpoint names, with the engines' dtypes and shapes; None if no replica could read its checkpoint."""
    replicas: tuple[Json, ...] = ()
    """Each has its `replica_id`, and the UUIDs of its `gpus`."""
    config: str = ""
    """Content of the checkpoint's config.json."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of each tensor that the checkpoint stores more than once."""


def read_rollout(reply: Json, prompt_index: int, n: int) -> Rollout:
    """Return the rollout in a reply of /v1/completions to one prompt. Raise `EngineFailed` if the reply is
    incomplete."""
    choices = sorted(reply.get("choices") or (), key=lambda choice: int(choice["index"]))
    if len(choices) != n:
        raise EngineFailed(f"{n} completions were requested, but the reply has {len(choices)}")
    prompt_token_ids = choices[0].get("prompt_token_ids")
    return Rollout(
        prompt_index=prompt_index,
        prompt_token_ids=None if prompt_token_ids is None else np.asarray(prompt_token_ids, np.int32),
        completions=tuple(_read_completion(choice, prompt_index, index) for index, choice in enumerate(choices)),
    )


def _read_completion(choice: Json, prompt_index: int, sample_index: int) -> Completion:
    if choice.get("token_ids") is None:
        raise EngineFailed("the reply lacks the requested token_ids: the server is neither vLLM nor SGLang")
    token_ids = np.asarray(choice["token_ids"], np.int32)
    scores = choice.get("logprobs")
    # Through float64, which turns None (JSON's NaN) into NaN.
    logprobs = None if scores is None else np.asarray(scores["token_logprobs"], np.float64).astype(np.float32)
    if logprobs is not None and len(logprobs) != len(token_ids):
        raise EngineFailed(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=token_ids,
        logprobs=logprobs,
        text=choice.get("text") or "",
        finish_reason=choice.get("finish_reason") or "abort",
        spans=tuple(
            WeightSpan(int(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or ()
        ),
        kv_versions=tuple(choice.get("kv_versions") or ()),
    )
