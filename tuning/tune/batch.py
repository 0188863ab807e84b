"""The batch that engines are measured with: drawn from lengths, or recorded."""

import hashlib
import json
import math
import random
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.http.trace import CHARACTERS_PER_TOKEN
from tuning.plan.workload import StepWorkload

Json = dict[str, Any]

# Ids in the vocabulary of every model, above the usual special tokens.
_TOKEN_IDS = range(3, 128)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its limits. Completions run to `max_tokens`, past any end-of-sequence token."""

    prompt_tokens: int
    max_tokens: int
    samples: int
    prompt: tuple[int, ...] = ()
    """The recorded ids; drawn again for every run where there are none."""

    def body(self, seed: str) -> Json:
        """Return a body for /v1/completions, with the log-probabilities and ids that trainers request.

        `seed` differs for each run: equal prompts would be answered from the prefix cache of the run before.
        """
        draw = random.Random(seed)
        return {
            "prompt": list(self.prompt) or draw.choices(_TOKEN_IDS, k=self.prompt_tokens),
            "n": self.samples,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": seed,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that arrive at once, as those of a trainer's step."""

    asks: tuple[Ask, ...]
    description: str
    """The description in reports."""

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

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.asks).encode()).hexdigest()[:16]

    def times(self, count: int) -> "Batch":
        """Return this batch `count` times at once, for an engine of `count` GPUs."""
        return replace(self, asks=self.asks * count)

    def opening(self) -> "Batch":
        """Return the same prompts with a few tokens each, to warm an engine up."""
        return replace(self, asks=tuple(replace(ask, max_tokens=min(4, ask.max_tokens)) for ask in self.asks))


def drawn(work: StepWorkload) -> Batch:
    """Return a batch of the workload's lengths. Samples of one prompt are equally long: a request has one limit."""
    draw = random.Random(_SEED)
    prompts = [max(1, round(length)) for length in work.prompt.quantiles(work.prompts)]
    responses = [max(1, round(length)) for length in work.response.quantiles(work.prompts)]
    draw.shuffle(prompts)
    draw.shuffle(responses)
    asks = tuple(Ask(prompt, response, work.samples) for prompt, response in zip(prompts, responses, strict=True))
    description = (
        f"{work.prompts} prompts x {work.samples} samples, {work.prompt.mean:g} tokens in (at most "
        f"{work.prompt.longest}), {work.response.mean:g} out (at most {work.response.longest})"
    )
    return Batch(asks, description)


def recorded(file: Path, most: int | None = None) -> Batch:
    """Return the first `most` prompts of a file: a gateway's trace (`gateway.trace.file`), or a line of JSON for each.

    Prompts of a trace have their own recorded lengths, and completions the mean length of their request. Other lines
    have `prompt` (token ids) or `prompt_tokens` (their number), `max_tokens`, and `n`. Raise `ConfigError` with the
    line at fault.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workload {str(file)!r}: cannot be read: {error}") from error
    read = (_asks(f"--workload {file}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    asks = tuple(islice(chain.from_iterable(read), most))
    if not asks:
        raise ConfigError(f"--workload {str(file)!r}: it holds no request that was answered")
    return Batch(asks, f"{len(asks)} prompts of {file.name}")


def _asks(place: str, line: str) -> list[Ask]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: an object is expected")
    if "trace" in found:
        return []  # the head of a gateway's trace
    if "prompts" not in found:
        return [_plain(place, found)]
    try:
        return _traced(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{place}: not a line of a trace: {error!r}") from None


def _plain(place: str, found: Json) -> Ask:
    prompt = found.get("prompt")
    if prompt is not None and not _is_ids(prompt):
        raise ConfigError(f"{place}: prompt: a list of token ids is expected; or give their number as prompt_tokens")
    return Ask(
        prompt_tokens=len(prompt) if prompt else _count(place, found, "prompt_tokens"),
        max_tokens=_count(place, found, "max_tokens"),
        samples=_count(place, {"n": 1} | found, "n"),
        prompt=tuple(prompt or ()),
    )


def _traced(found: Json) -> list[Ask]:
    """Return the prompts of one traced request; none for a failed request, or without counted tokens."""
    prompts, completed = found["prompts"], found["completion_tokens"]
    if found["status"] != 200 or not completed or not prompts:
        return []
    samples = int(found["params"].get("n") or 1)
    max_tokens = max(1, math.ceil(completed / (len(prompts) * samples)))
    return [
        Ask(
            prompt_tokens=max(
                1, recorded_prompt.get("tokens") or recorded_prompt["characters"] // CHARACTERS_PER_TOKEN
            ),
            max_tokens=max_tokens,
            samples=samples,
            prompt=tuple(recorded_prompt["content"]) if _is_ids(recorded_prompt.get("content")) else (),
        )
        for recorded_prompt in prompts
    ]


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token_id) is int for token_id in prompt)


def _count(place: str, found: Json, name: str) -> int:
    value = found.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{place}: {name} = {value!r}: a whole number of at least 1 is expected")
    return value
