"""A record of the requests to a live gateway, for `loadtests` to replay: one line of JSON for each request.

The file begins with a line about itself; a restarted gateway appends another and goes on. Prompts are recorded as
lengths and keyed hashes of their blocks: requests that share a prefix still share it in a replay, and the text cannot
be read. The key is made at the start and kept nowhere.
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
_MAX_BYTES = 1 << 30

# Numbers, switches and the model's name only: a field that may hold a user's text is left out.
_LIMITS = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "ignore_eos", "seed")
_DRAW = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OUTPUT = ("logprobs", "prompt_logprobs", "return_logprob", "stream", "model", "min_version", "max_staleness")
_PARAMS = frozenset(_LIMITS + _DRAW + _OUTPUT)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at its arrival. `at` is in seconds since the epoch, `began` on the monotonic clock."""

    route: str
    body: Json
    session: str
    at: float
    began: float


class Trace:
    """Writes lines on a thread of its own until the file is full. A disk failure ends the trace; requests go on."""

    def __init__(self, config: TraceConfig) -> None:
        """Raise `ConfigError` where the file cannot be written."""
        assert config.file is not None
        self._path, self._content = Path(config.file), config.content
        self._key = secrets.token_bytes(16)
        self._began = time.time()
        try:
            # Only the owner may read it: with gateway.trace.content it holds the texts of users.
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"gateway.trace.file = {config.file!r} cannot be written: {error.strerror}") from error
        self._room = _MAX_BYTES - os.fstat(self._file).st_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trace")
        first = {"trace": 1, "began": self._began, "block_tokens": BLOCK_TOKENS, "content": self._content}
        self._write(first)

    def ended(self, arrival: Arrival, status: int, usage: Json) -> None:
        """Record a request that has ended. Return at once."""
        if self._room > 0:
            self._thread.submit(self._record, arrival, time.monotonic() - arrival.began, status, usage)

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        self._thread.shutdown()
        os.close(self._file)

    def _record(self, arrival: Arrival, seconds: float, status: int, usage: Json) -> None:
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
        encoded = orjson.dumps(line) + b"\n"
        if len(encoded) > self._room:
            self._room = 0
            log.warning("trace is full: take the file away", file=str(self._path))
            return
        self._room -= len(encoded)
        os.write(self._file, encoded)

    def _line(self, arrival: Arrival, seconds: float, status: int, usage: Json) -> Json:
        body = arrival.body
        params = {**body, **sampling} if isinstance(sampling := body.get("sampling_params"), dict) else body
        return {
            "at": round(arrival.at - self._began, 6),
            "route": arrival.route,
            "session": self._hash(b"", arrival.session.encode()) if arrival.session else None,
            "params": {name: value for name, value in params.items() if name in _PARAMS and _is_plain(name, value)},
            "prompts": [self._prompt(prompt) for prompt in prompts_of(body)],
            "status": status,
            "seconds": round(seconds, 6),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
        }

    def _prompt(self, prompt: str | list[int]) -> Json:
        is_text = isinstance(prompt, str)
        record: Json = {"characters" if is_text else "tokens": len(prompt), "blocks": list(self._blocks(prompt))}
        return record | {"content": prompt} if self._content else record

    def _blocks(self, prompt: str | list[int]) -> Iterator[str]:
        """Yield a hash of each whole block and all before it: equal if and only if the prompts agree up to there."""
        size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN if isinstance(prompt, str) else BLOCK_TOKENS
        before = b""
        for start in range(0, len(prompt) - size + 1, size):
            block = prompt[start : start + size]
            digest = self._hash(before, block.encode() if isinstance(block, str) else array("q", block).tobytes())
            before = bytes.fromhex(digest)
            yield digest

    def _hash(self, before: bytes, content: bytes) -> str:
        return hashlib.blake2b(before + content, digest_size=_HASH_BYTES, key=self._key).hexdigest()


def prompts_of(body: Json) -> list[str | list[int]]:
    """Return the prompts of a request in any dialect: text, or token ids."""
    if isinstance(messages := body.get("messages"), list):
        return ["\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)]
    named = (body.get(name) for name in ("prompt", "token_ids", "input_ids", "text"))
    prompt: Any = next((value for value in named if value is not None), [])
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else list(prompt)


def _is_plain(name: str, value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and name == "model")
