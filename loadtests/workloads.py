"""Batches like a trainer's: prompts of token ids, n samples each, completions of known length."""

import random
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

# In the vocabulary of all models, also the demo's tiny one, and past the usual special tokens.
_TOKEN_IDS = range(3, 128)


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Weighted prompt lengths: `256`, or `128*3,1024*1` for three short prompts per long one."""

    lengths: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "LengthMix":
        parts = [part.partition("*") for part in text.split(",")]
        try:
            lengths = tuple(int(length) for length, _, _ in parts)
            weights = tuple(int(weight or 1) for _, _, weight in parts)
        except ValueError:
            raise ValueError(f"{text!r} is not a length or a mix of lengths: write 256, or 128*3,1024*1") from None
        if min(lengths) < 1 or min(weights) < 1:
            raise ValueError(f"lengths and weights are at least 1: {text!r}")
        return cls(lengths, weights)

    @property
    def is_one(self) -> bool:
        return len(self.lengths) == 1

    def drawn(self, draw: random.Random, count: int) -> list[int]:
        """Draw `count` lengths by weight."""
        return draw.choices(self.lengths, self.weights, k=count)

    def __str__(self) -> str:
        if self.is_one:
            return str(self.lengths[0])
        return ",".join(f"{length}*{weight}" for length, weight in zip(self.lengths, self.weights, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of request to /v1/completions. Without `model` the server uses its own."""

    prompts: int
    samples: int
    prompt_tokens: LengthMix
    max_tokens: int
    model: str = ""

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """The tokens of a reply: completions do not stop by themselves."""
        return self.completions * self.max_tokens

    def prompts_of(self, seed: str) -> list[list[int]]:
        """Return the prompts of a seed, the same on every machine."""
        draw = random.Random(seed)
        return [random_tokens(draw, length) for length in self.prompt_tokens.drawn(draw, self.prompts)]

    def request(self, seed: str) -> Json:
        """Return the request body."""
        sampling = {"n": self.samples, "max_tokens": self.max_tokens, "ignore_eos": True}
        return completion_request(self.prompts_of(seed), sampling, model=self.model)


def random_tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(_TOKEN_IDS, k=count)


def completion_request(prompt: list[Any], sampling: Json, *, model: str = "", stream: bool = False) -> Json:
    """Return a body for /v1/completions with TRL's fields for log-probabilities and token ids."""
    body: Json = {
        "prompt": prompt,
        **sampling,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if model:
        body["model"] = model
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def parse_batch(text: str) -> tuple[int, int]:
    """Parse `64x8` as 64 prompts of 8 samples each."""
    prompts, samples = map(int, text.split("x"))
    return prompts, samples
