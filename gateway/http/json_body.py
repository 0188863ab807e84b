"""JSON bodies in and out, with errors that say what was wrong."""

from typing import Any

import orjson
from aiohttp import web

from engines.errors import BodyTooLarge, InvalidRequest

# httpx's `aiter_lines`, for one. JSON writes those below U+0020 as escapes by itself.
_LINE_ENDS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\u0085\u2028\u2029"]


async def read_object(request: web.Request, *, required: bool = True) -> dict[str, Any]:
    """The body as a JSON object; an empty body is one without keys where it is not `required`."""
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(_too_large(request.content_length or 0, limit))
    try:
        content = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(_too_large(error.actual_size if hasattr(error, "actual_size") else 0, limit)) from error
    if not content and not required:
        return {}
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, this is a {type(body).__name__}")
    return body


def reply(body: Any, status: int = 200) -> web.Response:
    """A JSON reply. Lists of numbers may hold NaN, which orjson writes as null."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def event(body: Any) -> bytes:
    """A server-sent event, of one line also to clients that split lines as Unicode does: its line ends are escaped."""
    data = orjson.dumps(body)
    for character, escape in _LINE_ENDS:
        data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


def _too_large(size: int, limit: int) -> str:
    found = f"the body has {size} bytes" if size else "the body is longer"
    return f"{found} than gateway.max_body_bytes = {limit}: send fewer prompts at a time or raise the limit"
