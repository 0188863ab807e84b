"""A record of what was asked of a live gateway, for `loadtests` to ask again: one line of JSON for each request.

The file begins with a line about itself; a gateway that is started anew adds another and goes on. Prompts are told by
their lengths and by keyed hashes of their blocks, so that prefixes which requests share are still shared in a replay,
and nobody reads what was said. The key is made at the start and kept nowhere.
"""

import hashlib
import os
import secrets
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from engines.engine import Json
from engines.errors import ConfigError
from gateway.config.schema import TraceConfig

log = structlog.get_logger()

BLOCK_TOKENS = 32
CHARACTERS_PER_TOKEN = 4
_HASH_BYTES = 6

# Numbers and switches alone: whatever may hold words of a user is left out.
_LIMITS = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "ignore_eos", "seed")
_DRAW = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_TOLD = ("logprobs", "prompt_logprobs", "return_logprob", "stream", "model", "min_version", "max_staleness")
_PARAMS = frozenset(_LIMITS + _DRAW + _TOLD)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request when it came. `at` is the time since the epoch, `began` that of the monotonic clock."""

    route: str
    body: Json
    session: str
    at: float
    began: float


class Trace:
    """Writes lines until the file is full, on a thread of its own. A disk that fails ends it, and no request."""

    def __init__(self, config: TraceConfig) -> None:
        """Raises `ConfigError` where the file cannot be written."""
        assert config.file is not None
        self._path, self._content = Path(config.file), config.content
        self._key = secrets.token_bytes(16)
        self._began = time.time()
        try:
            # Of its owner alone: with gateway.trace.content it holds what users said.
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"gateway.trace.file = {config.file!r} cannot be written: {error.strerror}") from error
        self._room = config.max_bytes - os.fstat(self._file).st_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trace")
        self._write({"trace": 1, "began": self._began, "block_tokens": BLOCK_TOKENS, "content": self._content})

    def ended(self, arrival: Arrival, status: int, usage: Json) -> None:
        """Note a request that is over. Returns at once."""
        if self._room > 0:
            self._thread.submit(self._tell, arrival, time.monotonic() - arrival.began, status, usage)

    def close(self) -> None:
        """Write what is left."""
        self._thread.shutdown()
        os.close(self._file)

    def _tell(self, arrival: Arrival, seconds: float, status: int, usage: Json) -> None:
        try:
            line = self._line(arrival, seconds, status, usage)
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
            log.warning("a malformed request is not traced", route=arrival.route, error=repr(error))
            return
        try:
            self._write(line)
        except Exception as error:  # nobody would see the error of a thread
            self._room = 0
            log.error("trace ended", file=str(self._path), error=repr(error))

    def _write(self, line: Json) -> None:
        told = orjson.dumps(line) + b"\n"
        if len(told) > self._room:
            self._room = 0
            log.warning("trace is full: raise gateway.trace.max_bytes, or take the file away", file=str(self._path))
            return
        self._room -= len(told)
        os.write(self._file, told)

    def _line(self, arrival: Arrival, seconds: float, status: int, usage: Json) -> Json:
        body = arrival.body
        asked = {**body, **sampling} if isinstance(sampling := body.get("sampling_params"), dict) else body
        return {
            "at": round(arrival.at - self._began, 6),
            "route": arrival.route,
            "session": self._hash(b"", arrival.session.encode()) if arrival.session else None,
            "params": {name: value for name, value in asked.items() if name in _PARAMS and _is_plain(value)},
            "prompts": [self._prompt(prompt) for prompt in prompts_of(body)],
            "status": status,
            "seconds": round(seconds, 6),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        }

    def _prompt(self, prompt: str | list[int]) -> Json:
        is_text = isinstance(prompt, str)
        told: Json = {"characters" if is_text else "tokens": len(prompt), "blocks": list(self._blocks(prompt))}
        return told | {"content": prompt} if self._content else told

    def _blocks(self, prompt: str | list[int]) -> Iterator[str]:
        """A hash of each whole block and all before it: equal where, and only where, prompts are equal so far."""
        size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN if isinstance(prompt, str) else BLOCK_TOKENS
        before = b""
        for start in range(0, len(prompt) - size + 1, size):
            block = prompt[start : start + size]
            told = self._hash(before, block.encode() if isinstance(block, str) else array("q", block).tobytes())
            before = bytes.fromhex(told)
            yield told

    def _hash(self, before: bytes, content: bytes) -> str:
        return hashlib.blake2b(before + content, digest_size=_HASH_BYTES, key=self._key).hexdigest()


def prompts_of(body: Json) -> list[str | list[int]]:
    """The prompts of a request in any dialect: text, or token ids."""
    if isinstance(messages := body.get("messages"), list):
        return ["\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)]
    named = (body.get(name) for name in ("prompt", "token_ids", "input_ids", "text"))
    prompt: Any = next((value for value in named if value is not None), [])
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
