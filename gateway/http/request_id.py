"""The id of a request: the client's X-Request-Id, or a random id."""

import uuid

from aiohttp import web

HEADER = "X-Request-Id"


def request_id(request: web.Request) -> str:
    return request.headers.get(HEADER) or uuid.uuid4().hex
