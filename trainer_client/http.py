"""HTTP to the rollout URL, and the only place that translates its failures."""

import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
import orjson

from engines.errors import (
    ConfigError,
    DeadlineExceeded,
    GatewayUnreachable,
    InvalidRequest,
    RolloutGatewayError,
    TooManyRequests,
)
from gateway.api import error_of

Json = dict[str, Any]

CONNECT_TIMEOUT_S = 10.0
_SILENT_S = 60.0
_JSON = {"Content-Type": "application/json"}
_HEAD = struct.Struct(">xI")


def closed() -> InvalidRequest:
    """Return the error of a call that a closed client is asked for, or that its end cuts off."""
    return InvalidRequest("the client is closed: make another")


class Answer(NamedTuple):
    """An answer of any status."""

    status: int
    body: Any
    retry_after_s: float | None
    """None without a header Retry-After in seconds: only proxies send a date."""

    @property
    def error(self) -> RolloutGatewayError:
        """The gateway's error, of a status from 400 on."""
        error = error_of(self.status, self.body)
        if isinstance(error, TooManyRequests) and self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s
        return error


class GatewayHttp:
    """Pooled connections to one gateway, with `api_key` as bearer. Callers limit their number."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Return the JSON object answered. Raise the gateway's error, or as `answer` does."""
        answer = await self.answer(method, path, body, timeout_s=timeout_s, headers=headers)
        if answer.status >= 400:
            raise answer.error
        return answer.body if isinstance(answer.body, dict) else {"value": answer.body}

    async def answer(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer, whatever its status. Raise `GatewayUnreachable` or `DeadlineExceeded`.

        `timeout_s` is None if the caller bounds the wait.
        """
        try:
            data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise InvalidRequest(f"{path}: JSON cannot hold the request: {error}") from error
        sent = {**(_JSON if body is not None else {}), **(headers or {})}
        async with self._request(method, path, data, sent, total=timeout_s) as response:
            return await self._read(path, response)

    async def records(self, path: str) -> list[Json]:
        """Return the records of an answer in msgpack, each of which comes after its length. Raise the gateway's error,
        or as `answer` does, also where no byte comes for a minute."""
        async with self._request("GET", path, None, {}, sock_read=_SILENT_S) as response:
            if response.status >= 300:
                raise (await self._read(path, response)).error
            content = memoryview(await response.read())
        records, end = list[Json](), 0
        while end < len(content):
            begin = end + _HEAD.size
            end = begin + _HEAD.unpack_from(content, end)[0]
            records.append(msgspec.msgpack.decode(content[begin:end]))
        return records

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], **timeouts: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make a request, and raise errors of its connection as ours. The first opens the session, since it belongs to
        the running loop."""
        if self._is_closed:
            raise closed()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, **timeouts)
        options: Any = {"headers": headers, "timeout": timeout, "allow_redirects": False}
        try:
            async with self._session.request(method, self.url + path, data=data, **options) as response:
                yield response
        except (aiohttp.ClientError, ConnectionError) as error:
            # Before TimeoutError: a failed connection can be both.
            if self._is_closed:
                raise closed() from error
            arrived = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            reason = str(error) or type(error).__name__
            raise GatewayUnreachable(f"{self.url} is unreachable: {path}: {reason}", arrived=arrived) from error
        except TimeoutError as error:
            limit_s = timeout.total or timeout.sock_read or 0
            raise DeadlineExceeded(f"{self.url}: no answer to {path} within {limit_s:g} s") from error

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> Answer:
        """Return the answer. Raise `ConfigError` for a redirect, which would have a POST repeated as a GET."""
        status = response.status
        if 300 <= status < 400:
            place = response.headers.get("Location", "another place")
            raise ConfigError(f"{self.url}{path} redirects to {place} ({status}): give the client the URL there")
        content, retry_after = await response.read(), response.headers.get("Retry-After", "")
        try:
            body = orjson.loads(content) if content else {}
        except orjson.JSONDecodeError as error:
            if status < 400:
                raise RolloutGatewayError(f"{self.url}{path} did not answer JSON: {content[:200]!r}") from error
            body = content[:500].decode(errors="replace")
        return Answer(status, body, float(retry_after) if retry_after.isdecimal() else None)
