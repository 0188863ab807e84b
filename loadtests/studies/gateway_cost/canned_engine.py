"""An engine of recorded replies: it asks a real one once for each kind of request, and answers at next to no cost.

So a study can measure the CPU of a server between clients and engines, on replies as a real engine writes them.
"""

import asyncio
import http.client
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import orjson

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HAS_TOKENS = b'"choices":[{'
_GENERATION = ("/v1/completions", "/v1/chat/completions")
_ASK_TIMEOUT_S = 120.0

Key = tuple[object, ...]


class CannedEngine:
    """The recorded replies of one engine, by what decides their size. `event_s` are the seconds before each event with
    tokens, 0 to send all at once."""

    def __init__(self, engine: str, event_s: float) -> None:
        self._address = urlsplit(engine).netloc
        self._replies: dict[Key, asyncio.Task[list[bytes]]] = {}
        self.event_s = event_s

    async def answer(self, method: str, path: str, body: bytes) -> list[bytes]:
        """Return the parts of a response; ask the engine where nothing is recorded."""
        if path not in _GENERATION:
            return await asyncio.to_thread(self._ask, method, path, body)
        key = _key(path, body)
        if key not in self._replies:
            self._replies[key] = asyncio.create_task(asyncio.to_thread(self._ask, method, path, body))
        return await asyncio.shield(self._replies[key])

    def _ask(self, method: str, path: str, body: bytes) -> list[bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=_ASK_TIMEOUT_S)
        connection.request(method, path, body or None, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        content, kind = response.read(), response.headers.get_content_type()
        connection.close()
        head = f"HTTP/1.1 {response.status} {response.reason}\r\nContent-Type: {kind}\r\n".encode()
        if kind != "text/event-stream":
            return [head + f"Content-Length: {len(content)}\r\n\r\n".encode() + content]
        parts = [head + b"Transfer-Encoding: chunked\r\n\r\n"]
        for event in content.split(b"\n\n")[:-1]:
            if _HAS_TOKENS in event and self.event_s:
                parts.append(b"")
            parts[-1] += _chunked(event)
        parts[-1] += b"0\r\n\r\n"
        return parts


def _chunked(event: bytes) -> bytes:
    return f"{len(event) + 2:x}\r\n".encode() + event + b"\n\n\r\n"


def _key(path: str, body: bytes) -> Key:
    asked = orjson.loads(body)
    prompt = asked.get("prompt") or ()
    prompts = len(prompt) if prompt and isinstance(prompt[0], list) else 1
    fields = ("stream", "n", "max_tokens", "logprobs", "stream_interval", "return_token_ids")
    return path, prompts, asked.get("stream_options") is None, *(asked.get(field) for field in fields)


class _Connection(asyncio.Protocol):
    """One kept connection; requests come one after another."""

    def __init__(self, engine: CannedEngine) -> None:
        self._engine = engine
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(found[1]) if (found := _LENGTH.search(head)) else 0
        if len(rest) < length:
            return
        self._received = b""
        method, path, _ = head.split(b" ", 2)
        self._answering = asyncio.create_task(self._answer(method.decode(), path.decode(), rest))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    async def _answer(self, method: str, path: str, body: bytes) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        first, *rest = await self._engine.answer(method, path, body)
        self._transport.write(first)
        due = loop.time()
        for part in rest:
            due += self._engine.event_s
            await asyncio.sleep(due - loop.time())
            self._transport.write(part)


@asynccontextmanager
async def serve(engine: str, event_s: float = 0.0) -> AsyncIterator[str]:
    """Serve in front of `engine`."""
    canned = CannedEngine(engine, event_s)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(canned), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
