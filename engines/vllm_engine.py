"""A vLLM server over HTTP. The simulated engine speaks the same surface and is reached through this class too."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import orjson

from engines.engine import Engine, Json
from engines.errors import DeadlineExceeded, EngineFailed, EngineRefused, EngineUnreachable
from engines.types import PauseMode

# vLLM closes an idle connection after 5 s: one that is used again in that moment would look like a dead engine.
_KEEPALIVE_S = 4.0
_CONNECT_TIMEOUT_S = 5.0
_PACKED_AT_INIT = (0, 28)


class VllmEngine(Engine):
    """One vLLM server (seen with 0.26 and 0.32). Connections are pooled without limit: admission bounds them.

    `engine_version` is the server's own; the latest dialect is spoken where it is not given.
    """

    def __init__(self, replica_id: str, url: str, engine_version: str = "") -> None:
        self.replica_id = replica_id
        self.url = url
        # Trainers say `packed` in the place that the vLLM installed beside them has it, engines want it in their own.
        self._wants_packed_at_init = not engine_version or release(engine_version) >= _PACKED_AT_INIT
        self._packed = True
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            response_class=_Response,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def health(self, timeout_s: float) -> None:
        await self.ask("GET", "/health", None, timeout_s)

    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        return self._decoded(path, await self._read(method, path, body, timeout_s))

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        return await self.ask("POST", path, {**body, "stream": False}, timeout_s)

    async def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        async with self._request("POST", path, {**body, "stream": True}, timeout_s) as response:
            async for event in _server_sent_events(response.content):
                if event == b"[DONE]":
                    return
                chunk = self._decoded(path, event)
                if "error" in chunk:
                    raise EngineFailed(f"{path} broke off: {chunk['error']}", replica_id=self.replica_id)
                yield chunk
        raise EngineUnreachable(f"{path} ended without [DONE]", replica_id=self.replica_id)

    async def weight_version(self, timeout_s: float) -> int | None:
        try:
            version = str((await self.ask("GET", "/weight_info", None, timeout_s)).get("weight_version"))
        except EngineRefused:
            return None  # vLLM before weight versions
        return version_number(version)

    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        rest = {key: value for key, value in init_info.items() if key != "packed"}
        self._packed = init_info.get("packed", True)  # a trainer that says it later always packs
        info = rest | {"packed": self._packed} if self._wants_packed_at_init else rest
        await self.ask("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout_s)

    async def close_weight_group(self, timeout_s: float) -> None:
        await self.ask("POST", "/shutdown_weight_transfer_engine", None, timeout_s)

    async def start_weight_update(self, timeout_s: float) -> None:
        await self.ask("POST", "/start_weight_update", {}, timeout_s)

    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        rest = {key: value for key, value in update_info.items() if key != "packed"}
        info = rest if self._wants_packed_at_init else {"packed": self._packed} | update_info
        await self.ask("POST", "/update_weights", {"update_info": info}, timeout_s)

    async def finish_weight_update(self, version: int, timeout_s: float) -> None:
        await self.ask("POST", "/finish_weight_update", {"weight_version": str(version)}, timeout_s)

    async def abandon_weight_update(self, timeout_s: float) -> None:
        # vLLM has no word for it. A finish without a version closes the session; where a failed transfer has closed it
        # already, vLLM answers 500 and nothing is left to do.
        with contextlib.suppress(EngineFailed):
            await self.ask("POST", "/finish_weight_update", {}, timeout_s)

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        await self.ask("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", None, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.ask("POST", "/resume", None, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        return bool((await self.ask("POST", "/reset_prefix_cache", None, timeout_s)).get("success", True))

    async def metrics(self, timeout_s: float) -> str:
        return (await self._read("GET", "/metrics", None, timeout_s)).decode()

    async def _read(self, method: str, path: str, body: Json | None, timeout_s: float) -> bytes:
        async with self._request(method, path, body, timeout_s) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Json | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The one door where connection errors and engine statuses become ours."""
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
            raise EngineUnreachable(f"{path}: {error or type(error).__name__}", replica_id=self.replica_id) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {self.replica_id}: no answer to {path} within {timeout_s:g} s") from error

    def _error(self, path: str, status: int, content: bytes) -> EngineRefused | EngineFailed:
        try:
            body = orjson.loads(content)
        except orjson.JSONDecodeError:
            body = {}
        message = f"{path} answered {status}: {_message(body) or content[:500].decode(errors='replace')}"
        if status < 500 and isinstance(body, dict):
            return EngineRefused(message, status=status, body=body, replica_id=self.replica_id)
        return EngineFailed(message, replica_id=self.replica_id)

    def _decoded(self, path: str, content: bytes) -> Json:
        try:
            reply = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError as error:
            raise EngineFailed(f"{path} answered no JSON: {content[:200]!r}", replica_id=self.replica_id) from error
        return reply if isinstance(reply, dict) else {"value": reply}


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


def release(version: str) -> tuple[int, int]:
    """Major and minor of a vLLM version such as "0.32.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def version_number(label: str) -> int:
    """vLLM's versions are labels; ours are numbers. It calls the weights it started with "default"."""
    return int(label) if label.isdigit() else 0


def _message(body: Any) -> str:
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
