"""The HTTP side that all engine clients share: pooled connections, and the one door where failures become ours."""

import contextlib
from abc import ABC
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import orjson

from engines.engine import Engine, Json
from engines.errors import DeadlineExceeded, EngineFailed, EngineGone, EngineRefused, EngineUnreachable

# vLLM and SGLang close an idle connection after 5 s: one used again in that moment would look like a dead engine.
_KEEPALIVE_S = 4.0
_CONNECT_TIMEOUT_S = 5.0


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
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"} if data else None
        # aiohttp's own time limit and not asyncio.timeout, which, while a stream's reader is busy with a chunk, would
        # cancel the reader.
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, path, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise self._error(path, response.status, await response.read())
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            # First, since a connection that does not come about is a TimeoutError too.
            kind = EngineGone if _is_refused(error) else EngineUnreachable
            raise kind(f"{path}: {error or type(error).__name__}", replica_id=self.replica_id) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {self.replica_id}: no answer to {path} within {timeout_s:g} s") from error

    def _error(self, path: str, status: int, content: bytes) -> EngineRefused | EngineFailed:
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            body = {}
        message = f"{path} answered {status}: {message_of(body) or content[:500].decode(errors='replace')}"
        if status < 500 and isinstance(body, dict):
            return EngineRefused(message, status=status, body=body, replica_id=self.replica_id)
        return EngineFailed(message, replica_id=self.replica_id)

    def _decoded(self, path: str, content: bytes) -> Json:
        try:
            reply = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"{path} answered no JSON: {content[:200]!r}", replica_id=self.replica_id) from error
        return reply if isinstance(reply, dict) else {"value": reply}


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
    """The data of each event. Splits by hand, since a line may be longer than the reader's line limit."""
    rest = b""
    async for block in content.iter_any():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()
