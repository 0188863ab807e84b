"""Recorded traces of a gateway (`gateway.trace.file`), as requests for a replay.

Prompts are synthetic, with the recorded lengths and equal prefixes. A trace with prompts is sent as recorded. A
conversation is sent as the text of its messages.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loadtests.workloads import Json, random_tokens

_CHARACTERS_PER_TOKEN = 4


class TraceError(ValueError):
    """A file that is not a trace, or has no requests."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace. `at` is in seconds after the first request, `samples` is completions per prompt, `tokens`
    the mean length of a completion, None if unknown."""

    at: float
    prompts: list[Any]
    samples: int
    tokens: int | None
    params: Json
    session: str

    @property
    def completions(self) -> int:
        return len(self.prompts) * self.samples


def read_trace(path: Path) -> list[Recorded]:
    """Return the answered requests in order of arrival. Raise `TraceError` with file and line."""
    began, block_tokens, found = 0.0, 0, []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    for number, text in enumerate(content.splitlines(), 1):
        try:
            line = orjson.loads(text)
            if "trace" in line:
                began, block_tokens = line["began"], line["block_tokens"]
            elif not block_tokens:
                raise KeyError("trace")
            elif line["status"] == 200 and line["prompts"]:
                found.append(_recorded(line, began, block_tokens, number))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: not a line of a trace: {error!r}") from error
    if not found:
        raise TraceError(f"{path}: no request in it was answered")
    found.sort(key=lambda recorded: recorded.at)
    first = found[0].at
    return [Recorded(r.at - first, r.prompts, r.samples, r.tokens, r.params, r.session) for r in found]


def _recorded(line: Json, began: float, block_tokens: int, number: int) -> Recorded:
    params, recorded = dict(line["params"]), line["prompts"]
    samples = params.pop("n", None) or 1
    completed = line["completion_tokens"]
    if len(recorded) == 1 and "tokens" not in recorded[0] and line["prompt_tokens"]:
        recorded = [recorded[0] | {"tokens": line["prompt_tokens"]}]
    return Recorded(
        at=began + line["at"],
        prompts=[_prompt(prompt, block_tokens, f"{began} {number} {index}") for index, prompt in enumerate(recorded)],
        samples=samples,
        tokens=max(1, math.ceil(completed / (len(recorded) * samples))) if completed else None,
        params=params,
        session=line["session"] or "",
    )


def _prompt(recorded: Json, block_tokens: int, seed: str) -> Any:
    if "content" in recorded:
        return recorded["content"]
    length = recorded["tokens"] if "tokens" in recorded else max(1, recorded["characters"] // _CHARACTERS_PER_TOKEN)
    return list(_tokens(recorded["blocks"], length, block_tokens, seed))


def _tokens(blocks: Sequence[str], length: int, block_tokens: int, seed: str) -> Iterator[int]:
    """Yield tokens drawn from each block's hash; tokens after the last whole block are unique."""
    left = length
    for block in blocks[: length // block_tokens]:
        yield from random_tokens(random.Random(block), block_tokens)
        left -= block_tokens
    yield from random_tokens(random.Random(seed), left)
