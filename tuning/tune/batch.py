"""The batch that engines are measured with: drawn from lengths, or of a gateway's trace."""

import json
import math
import random
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.http.trace import CHARACTERS_PER_TOKEN
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


def recorded(file: Path, most: int | None = None) -> Batch:
    """Return the first `most` prompts of a gateway's trace (`gateway.trace.file`) with their lengths; completions have
    the mean length of their request's. Raise `ConfigError` with the line at fault."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workload {str(file)!r}: cannot be read: {error}") from error
    asks = tuple(islice((ask for number, line in enumerate(lines, 1) for ask in _asks(file, number, line)), most))
    if not asks:
        raise ConfigError(f"--workload {str(file)!r}: it holds no request that was answered")
    return Batch(asks, f"{len(asks)} prompts of {file.name}")


def _asks(file: Path, number: int, line: str) -> list[Ask]:
    """Return the prompts of one request; none for the head of a trace, a failed request, or without counted tokens."""
    try:
        found = json.loads(line)
        if "trace" in found or found["status"] != 200 or not found["completion_tokens"] or not found["prompts"]:
            return []
        samples = int(found["params"].get("n") or 1)
        max_tokens = max(1, math.ceil(found["completion_tokens"] / (len(found["prompts"]) * samples)))
        return [Ask(_length(prompt), max_tokens, samples) for prompt in found["prompts"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"--workload {file}:{number}: not a line of a trace: {error!r}") from None


def _length(prompt: Json) -> int:
    return max(1, int(prompt.get("tokens") or prompt["characters"] // CHARACTERS_PER_TOKEN))
