"""HTTP for all engine clients: pooled connections, and the only place that translates failures."""

import contextlib
import errno
from abc import ABC
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import orjson

from engines.clients.connections import CannotConnect, Connection, Connections
from engines.engine import Engine, Json, body_in_json
from engines.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineGone,
    EngineRefused,
    EngineUnreachable,
)
from engines.trace_context import TRACE_CONTEXT

T = TypeVar("T")

# vLLM and SGLang close idle connections after 5 s; reuse at that moment would look like a dead engine.
_KEEPALIVE_S = 4.0
_JSON = {"Content-Type": "application/json"}
_DONE = b"[DONE]"
_HEAD_BYTES = 1 << 9  # an error comes without tokens, so its name is within the first bytes of a chunk
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class HttpEngine(Engine, ABC):
    """A server reached over HTTP, with `api_key` as bearer.

    Connections are pooled without limit: admission bounds them.
    """

    def __init__(self, replica_id: str, url: str, api_key: str = "", *, has_tee: bool = False) -> None:
        super().__init__(replica_id, url, has_tee=has_tee)
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = Connections(url, authorization, _KEEPALIVE_S)

    async def close(self) -> None:
        await self._connections.close()
        if self.beside is not None:
            await self.beside.close()

    async def health(self, timeout_s: float) -> None:
        await self.read("GET", "/health", None, timeout_s)

    async def metrics(self, timeout_s: float) -> str:
        return (await self.read("GET", "/metrics", None, timeout_s)).decode(errors="replace")

    async def lora_adapters(self, timeout_s: float) -> dict[str, str]:
        # vLLM and SGLang list them among the models, with the base model as parent.
        return self._translated(_adapters, await self._call("GET", "/v1/models", None, timeout_s))

    def _translated(self, translate: Callable[[Json], T], answer: Json) -> T:
        """Return the translation of an answer. Raise `EngineFailed` where it has another form than its route's."""
        try:
            return translate(answer)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineFailed(
                f"its answer {answer!r:.200} cannot be read: {type(error).__name__}: {error}",
                replica_id=self.replica_id,
            ) from error

    async def _call(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """Return the server's JSON object for its own route `path`."""
        return self._decoded(path, await self.read(method, path, body, timeout_s))

    async def _events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        """Yield the events of a stream up to [DONE], in lists of those that came together."""
        begun: list[bytes] = []
        async with self._request("POST", path, body, timeout_s) as response:
            while block := await response.block():
                events = _completed(begun, block)
                is_last = _DONE in events
                if is_last:
                    events = events[: events.index(_DONE)]
                for place, event in enumerate(events):
                    if event.find(b'"error"', 0, _HEAD_BYTES) >= 0 and "error" in (chunk := self._decoded(path, event)):
                        if place:
                            yield events[:place]
                        raise self._broken_off(path, chunk)
                if events:
                    yield events
                if is_last:
                    return
        raise EngineUnreachable(f"{path} ended without [DONE]", replica_id=self.replica_id)

    def _broken_off(self, path: str, chunk: Json) -> EngineRefused | EngineFailed:
        message, error = f"{path} was interrupted: {chunk['error']}", chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        return error_of(code, message, chunk, self.replica_id)

    async def read(self, method: str, path: str, body: Json | bytes | None, timeout_s: float) -> bytes:
        if self.beside is not None and not self._connections.closed:
            return await self.beside.call(method, path, body, timeout_s)
        async with self._request(method, path, body, timeout_s) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Json | bytes | None, timeout_s: float
    ) -> AsyncIterator[Connection]:
        """Send a request; translate connection errors and engine statuses into our errors."""
        if self._connections.closed:
            raise EngineGone(f"{path}: the client is closed", replica_id=self.replica_id)
        data = body_in_json(body) or None
        headers = TRACE_CONTEXT.get() | (_JSON if data else {})
        try:
            async with self._connections.request(
                method, path, data=data, headers=headers, timeout_s=timeout_s
            ) as response:
                if not 200 <= response.status < 300:
                    raise self._error(path, response, await response.read())
                yield response
        except ConnectionError as error:
            raise self._unreachable(path, error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {self.replica_id}: no answer to {path} within {timeout_s:g} s") from error

    def _unreachable(self, path: str, error: ConnectionError) -> EngineUnreachable:
        reason = error.reason if isinstance(error, CannotConnect) else None
        # A refused connection: nothing listens. A busy server lets connections wait.
        kind = EngineGone if isinstance(reason, ConnectionRefusedError) else EngineUnreachable
        unreachable = kind(f"{path}: {error or type(error).__name__}", replica_id=self.replica_id)
        if isinstance(reason, TimeoutError) or getattr(reason, "errno", None) in _NO_DESCRIPTORS:
            unreachable.retry_after_s = 0.0  # it has accepted nothing, so nothing has failed there
        return unreachable

    def _error(self, path: str, response: Connection, content: bytes) -> EngineRefused | EngineFailed:
        status = response.status
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            body = {}
        message = f"{path} answered {status}: {message_of(body) or content[:500].decode(errors='replace')}"
        error = error_of(status, message, body, self.replica_id)
        error.retry_after_s = _seconds(response.headers.get("retry-after"))
        return error

    def _decoded(self, path: str, content: bytes) -> Json:
        try:
            reply = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"{path} did not answer JSON: {content[:200]!r}", replica_id=self.replica_id) from error
        return reply if isinstance(reply, dict) else {"value": reply}


def _adapters(models: Json) -> dict[str, str]:
    cards = models.get("data") or ()
    return {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent")}


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds; None if there is none, or a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None


def error_of(status: Any, message: str, body: Any, replica_id: str) -> EngineRefused | EngineFailed:
    """Return the error of an answer by its status: of an HTTP reply, or of an error within a stream."""
    if isinstance(status, int) and 400 <= status < 500 and isinstance(body, dict):
        return EngineRefused(message, status=status, body=body, replica_id=replica_id)
    failed = EngineFailed(message, replica_id=replica_id)
    failed.status = status if isinstance(status, int) else None
    return failed


def message_of(body: Any) -> str:
    """Return the text of an error body, which vLLM nests in two ways."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error.get("detail", "")) if isinstance(error, dict) else error)


def _completed(begun: list[bytes], block: bytes) -> list[bytes]:
    """Return the data of the server-sent events that a block completes; `begun` keeps what it begins.

    JSON holds no bare line end, so an event is a line.
    """
    begun.append(block)
    if b"\n" not in block:
        return []
    *lines, rest = b"".join(begun).split(b"\n")
    begun[:] = [rest]
    return [line[5:].strip() for line in lines if line.startswith(b"data:")]
