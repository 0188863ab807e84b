"""The HTTP side that all engine clients share: pooled connections, and the one door where failures become ours."""

import contextlib
import errno
from abc import ABC
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import orjson

from engines.engine import Engine, Json
from engines.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineGone,
    EngineRefused,
    EngineUnreachable,
    InvalidRequest,
    NoDescriptors,
)

# vLLM and SGLang close an idle connection after 5 s: one used again in that moment would look like a dead engine.
_KEEPALIVE_S = 4.0
# A busy event loop, here or there, may take long to accept; probes find a dead host sooner.
_CONNECT_TIMEOUT_S = 30.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class HttpEngine(Engine, ABC):
    """A server reached over HTTP, with `api_key` as bearer where it wants one.

    Connections are pooled without limit: admission bounds them.
    """

    def __init__(self, replica_id: str, url: str, api_key: str = "") -> None:
        self.replica_id = replica_id
        self.url = url
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )

    async def close(self) -> None:
        await self._session.close()

    async def health(self, timeout_s: float) -> None:
        await self._read("GET", "/health", None, timeout_s)

    async def metrics(self, timeout_s: float) -> str:
        return (await self._read("GET", "/metrics", None, timeout_s)).decode()

    async def _known_adapters(self, timeout_s: float) -> dict[str, str]:
        """vLLM and SGLang list adapters among the models, with the model beneath as their parent."""
        cards = (await self._call("GET", "/v1/models", None, timeout_s)).get("data") or ()
        return {str(card["id"]): str(card.get("root") or "") for card in cards if card.get("parent")}

    async def _call(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        """The JSON object that the server answers on its own route `path`."""
        return self._decoded(path, await self._read(method, path, body, timeout_s))

    async def _events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        """The events of a stream up to [DONE]."""
        async with self._request("POST", path, body, timeout_s) as response:
            async for event in _server_sent_events(response.content):
                if event == b"[DONE]":
                    return
                chunk = self._decoded(path, event)
                if "error" in chunk:
                    raise self._broken_off(path, chunk)
                yield chunk
        raise EngineUnreachable(f"{path} ended without [DONE]", replica_id=self.replica_id)

    def _broken_off(self, path: str, chunk: Json) -> EngineRefused | EngineFailed:
        message, error = f"{path} broke off: {chunk['error']}", chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            return EngineRefused(message, status=code, body=chunk, replica_id=self.replica_id)
        return EngineFailed(message, replica_id=self.replica_id)

    async def _read(self, method: str, path: str, body: Json | None, timeout_s: float) -> bytes:
        async with self._request(method, path, body, timeout_s) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Json | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The one door where connection errors and engine statuses become ours."""
        if self._session.closed:
            raise EngineGone(f"{path}: it was given up before", replica_id=self.replica_id)
        data = None if body is None else _encoded(body)
        headers = {"Content-Type": "application/json"} if data else None
        # aiohttp's own time limit and not asyncio.timeout, which, while a stream's reader is busy with a chunk, would
        # cancel the reader.
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, path, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise self._error(path, response, await response.read())
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            # First, since a connection that does not come about is a TimeoutError too.
            raise self._unreachable(path, error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {self.replica_id}: no answer to {path} within {timeout_s:g} s") from error

    def _unreachable(self, path: str, error: Exception) -> EngineUnreachable | NoDescriptors:
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _NO_DESCRIPTORS:
            return NoDescriptors(
                f"{path}: this process has no file descriptor left: raise its limit (ulimit -n)",
                replica_id=self.replica_id,
            )
        kind = EngineGone if _is_refused(error) else EngineUnreachable
        unreachable = kind(f"{path}: {error or type(error).__name__}", replica_id=self.replica_id)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            unreachable.retry_after_s = 0.0  # it has accepted nothing, so nothing has failed there
        return unreachable

    def _error(self, path: str, response: aiohttp.ClientResponse, content: bytes) -> EngineRefused | EngineFailed:
        status = response.status
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            body = {}
        message = f"{path} answered {status}: {message_of(body) or content[:500].decode(errors='replace')}"
        error: EngineRefused | EngineFailed = EngineFailed(message, replica_id=self.replica_id)
        if status < 500 and isinstance(body, dict):
            error = EngineRefused(message, status=status, body=body, replica_id=self.replica_id)
        error.retry_after_s = _seconds(response.headers.get("Retry-After"))
        return error

    def _decoded(self, path: str, content: bytes) -> Json:
        try:
            reply = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"{path} answered no JSON: {content[:200]!r}", replica_id=self.replica_id) from error
        return reply if isinstance(reply, dict) else {"value": reply}


def _encoded(body: Json) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # more than 254 levels, or text that is no UTF-8
        raise InvalidRequest(f"the body cannot be passed on as JSON: {error}") from error


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds; None if there is none, or a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None


def _is_refused(error: BaseException) -> bool:
    """A busy server lets connections wait; only where nobody listens are they refused."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


class _Response(aiohttp.ClientResponse):
    """Closes its connection after a 5xx, as vLLM does without saying so: the next request must not meet it."""

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        await super().start(connection)
        if self.status >= 500 and protocol is not None:
            protocol.force_close()
            if self.connection is None:  # the whole body is here, and the connection back in the pool
                protocol.close()
        return self


def message_of(body: Any) -> str:
    """The text of an error body, which vLLM nests in one of two ways."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error.get("detail", "")) if isinstance(error, dict) else error)


async def _server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event. Splits by hand, since a line may be longer than the reader's line limit.

    JSON holds no bare line end, so every CR belongs to a CRLF.
    """
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block.replace(b"\r", b"")).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()
