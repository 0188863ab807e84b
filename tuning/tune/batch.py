"""The batch that engines are measured with."""

import random
from dataclasses import dataclass, replace
from typing import Any

from tuning.plan.workload import StepWorkload

Json = dict[str, Any]

# Ids in the vocabulary of every model, above the usual special tokens.
_TOKEN_IDS = range(3, 128)


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its limits. Completions run to `max_tokens`, past any end-of-sequence token."""

    prompt_tokens: int
    max_tokens: int
    samples: int

    def body(self, seed: str) -> Json:
        """Return a body for /v1/completions, with the log-probabilities and ids that trainers request.

        `seed` differs for each run: equal prompts would be answered from the prefix cache of the run before.
        """
        return {
            "prompt": random.Random(seed).choices(_TOKEN_IDS, k=self.prompt_tokens),
            "n": self.samples,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that arrive at once, as those of a trainer's step."""

    asks: tuple[Ask, ...]
    description: str

    @property
    def completions(self) -> int:
        return sum(ask.samples for ask in self.asks)

    @property
    def tokens(self) -> int:
        """Tokens that a whole run generates."""
        return sum(ask.samples * ask.max_tokens for ask in self.asks)

    @property
    def longest(self) -> int:
        return max(ask.prompt_tokens + ask.max_tokens for ask in self.asks)

    def opening(self) -> "Batch":
        """Return the same prompts with a few tokens each, to warm an engine up."""
        return replace(self, asks=tuple(replace(ask, max_tokens=min(4, ask.max_tokens)) for ask in self.asks))


def drawn(work: StepWorkload) -> Batch:
    """Return a batch of the workload's lengths. Samples of one prompt are equally long: a request has one limit."""
    draw = random.Random(0)
    prompts = [max(1, round(length)) for length in work.prompt.quantiles(work.prompts)]
    responses = [max(1, round(length)) for length in work.response.quantiles(work.prompts)]
    draw.shuffle(prompts)
    draw.shuffle(responses)
    asks = tuple(Ask(prompt, response, work.samples) for prompt, response in zip(prompts, responses, strict=True))
    return Batch(asks, f"{work.prompts} prompts x {work.samples} samples")
