"""Recorded requests of a gateway (`gateway.trace.file`) as a workload.

A request without a session comes when it came then. A turn of a session comes after the turn before as long as it did
then. Completions have the mean length of their request.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.http.trace import CHARACTERS_PER_TOKEN
from tuning.simulate.workloads.workload import Ask, Chain, Stream

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Request:
    """An answered request. `at` and `ended` are in seconds of the trace's clock; `asks` lack `after_s`."""

    at: float
    ended: float
    asks: list[Ask]
    blocks: list[str]
    """Hashes of the first prompt's blocks, each of all tokens up to its end."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The same requests for every seed."""

    chains: list[Chain]

    @classmethod
    def read(cls, file: Path) -> "Recorded":
        """Raise `ConfigError` with the line at fault."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--workload {str(file)!r}: cannot be read: {error}") from error
        requests = sorted(_requests(file, lines), key=lambda request: request.at)
        if not requests:
            raise ConfigError(f"--workload {str(file)!r}: it holds no request that was answered")
        return cls(_chains(requests))

    def stream(self, seed: int) -> Stream:
        return [self.chains]


def _requests(file: Path, lines: list[str]) -> Iterator[_Request]:
    began = math.nan
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if "trace" in line:
                began = float(line["began"])
            elif math.isnan(began):
                raise ValueError("the line before it that begins a trace is missing")
            elif line["status"] == 200 and line["prompts"] and line["completion_tokens"]:
                yield _request(line, began, number)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"--workload {file}:{number}: not a line of a trace: {error!r}") from None


def _request(line: Json, began: float, number: int) -> _Request:
    prompts, samples = line["prompts"], int(line["params"].get("n") or 1)
    length = max(1, math.ceil(line["completion_tokens"] / (len(prompts) * samples)))
    at, params = began + line["at"], line["params"]
    limit = int(params.get("max_tokens") or params.get("max_completion_tokens") or length)
    asks = [
        Ask(
            request=f"line-{number}", text=hash(tuple(prompt["blocks"]) or (number, place)),
            prefix=tuple(prompt["blocks"][-1:]) or (number, place), prompt=_tokens(prompt), lengths=(length,) * samples,
            limit=max(length, limit), session=(line["session"] or "") if len(prompts) == 1 else "",
        )
        for place, prompt in enumerate(prompts)
    ]  # fmt: skip
    return _Request(at, at + line["seconds"], asks, prompts[0]["blocks"])


def _tokens(prompt: Json) -> int:
    return max(1, int(prompt["tokens"] if "tokens" in prompt else prompt["characters"] // CHARACTERS_PER_TOKEN))


def _chains(requests: list[_Request]) -> list[Chain]:
    began, sessions, chains = requests[0].at, dict[str, list[_Request]](), list[Chain]()
    for request in requests:
        if request.asks[0].session:
            sessions.setdefault(request.asks[0].session, []).append(request)
        else:
            chains += [[replace(ask, after_s=request.at - began)] for ask in request.asks]
    return chains + [_session(turns, began) for turns in sessions.values()]


def _session(turns: list[_Request], began: float) -> Chain:
    """A turn that does not begin with the turn before shares nothing with it."""
    asks: list[Ask] = []
    before: _Request | None = None
    for turn in turns:
        (ask,) = turn.asks
        prefix: Any = (ask.session, len(asks))
        known = 0
        if before is not None and turn.blocks[: len(before.blocks)] == before.blocks:
            prefix, known = asks[-1].prefix, min(ask.prompt, asks[-1].prompt + asks[-1].lengths[0])
        wait_s = turn.at - (began if before is None else before.ended)
        asks.append(replace(ask, prefix=prefix, known=known, after_s=max(0.0, wait_s)))
        before = turn
    return asks
