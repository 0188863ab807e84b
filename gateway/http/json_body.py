"""JSON bodies in and out, with errors that name the fault."""

import asyncio
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engines.errors import BodyTooLarge, InvalidRequest
from engines.raw_json import encoded

_QUIET_TIMEOUT_S = 30.0  # between two parts of a body
_LARGEST_INFLATED = 64 << 20
_UNREADABLE = (web.HTTPBadRequest, web.RequestPayloadError, aiohttp.ClientError, HttpProcessingError)


async def read_object(request: web.Request, *, required: bool = True) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body is `{}` unless it is `required`."""
    content = await read_content(request)
    return {} if not content and not required else as_object(content)


def as_object(content: bytes) -> dict[str, Any]:
    """Return a body as a JSON object."""
    try:
        return _object(orjson.loads(content))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from error


async def read_packed(request: web.Request) -> dict[str, Any]:
    """Return a msgpack body, whose arrays may be bytes."""
    try:
        return _object(msgspec.msgpack.decode(await read_content(request)))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no msgpack: {error}") from error


async def read_content(request: web.Request) -> bytes:
    """Return the body, decompressed. Raise `BodyTooLarge`, or `InvalidRequest` where it cannot be read."""
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(_too_large(request.content_length or 0, limit))
    try:
        if request.content.is_eof() and "Content-Encoding" not in request.headers:
            content = request.content.read_nowait()
            if len(content) > limit:
                raise BodyTooLarge(_too_large(len(content), limit))
            return content
        return await _content(request, limit)
    except TimeoutError as error:
        raise InvalidRequest(f"the body stopped: no part of it came for {_QUIET_TIMEOUT_S:g} s") from error
    except _UNREADABLE as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, this is a {type(body).__name__}")
    return body


async def _content(request: web.Request, limit: int) -> bytes:
    """Return the body, decompressed. A compressed body has a smaller limit, as it may inflate to a large size."""
    if "Content-Encoding" in request.headers:
        limit = min(limit, _LARGEST_INFLATED)
    blocks, size, clock = [], 0, asyncio.get_running_loop().time
    async with asyncio.timeout(_QUIET_TIMEOUT_S) as quiet:
        async for block in request.content.iter_any():
            quiet.reschedule(clock() + _QUIET_TIMEOUT_S)
            size += len(block)
            if size > limit:
                raise BodyTooLarge(_too_large(0, limit))
            blocks.append(block)
    return b"".join(blocks)


def reply(body: Any, status: int = 200) -> web.Response:
    """Return a JSON reply."""
    return web.Response(body=encoded(body), status=status, content_type="application/json")


def _too_large(size: int, limit: int) -> str:
    found = f"the body has {size} bytes" if size else "the body is longer"
    return f"{found} than gateway.max_body_bytes = {limit}: send fewer prompts at a time or raise the limit"
