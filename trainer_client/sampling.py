"""Sampling parameters that all engines support, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.errors import InvalidRequest

_ALWAYS = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Always sent: otherwise engines take defaults from the model's generation config."""
_WHERE_SET = ("min_tokens", "ignore_eos")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`n` completions of each prompt, of at most `max_tokens` tokens. The gateway checks the values.

    The defaults sample from the model's distribution, so that log-probabilities are the policy's. `top_k` 0 is all
    tokens. `seed` makes samples reproducible. `extra` has other fields of /v1/completions, such as
    `structured_outputs`.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(given := getattr(self, "n"), str):  # noqa: B009 mypy takes it for a number
            raise InvalidRequest(f"n = {given!r} is text: give a whole number", param="n")
        if isinstance(self.stop, str):
            raise InvalidRequest(f"stop = {self.stop!r} is a string: give a list of strings", param="stop")
        if taken := sorted(_OWN & set(self.extra)):
            raise InvalidRequest(f"extra has {taken[0]!r}, which the client sets itself", param=f"extra.{taken[0]}")

    def body(self) -> dict[str, Any]:
        """Return the fields of a body of /v1/completions."""
        body: dict[str, Any] = {name: getattr(self, name) for name in _ALWAYS}
        body |= {name: value for name in _WHERE_SET if (value := getattr(self, name))}
        body |= {name: list(given) for name in ("stop", "stop_token_ids") if (given := getattr(self, name))}
        if self.seed is not None:
            body["seed"] = self.seed
        if self.logprobs:
            body["logprobs"] = 0  # only the sampled token's
        return body | {"return_token_ids": True, **self.extra}


_OWN = {"prompt", "stream", "model", "return_token_ids", *SamplingParams.__dataclass_fields__} - {"extra"}
