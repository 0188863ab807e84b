"""The id of a request: the client's X-Request-Id, or a random id if that is not printable ASCII."""

import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.dialects.sampling import LONGEST_ID

HEADER = "X-Request-Id"


def request_id(request: web.Request, body: Mapping[str, Any] | None = None) -> str:
    """The header's id, then `request_id` of the body, then a random id."""
    return given_id(request) or _printable((body or {}).get("request_id")) or uuid.uuid4().hex


def given_id(request: web.Request) -> str:
    """The client's own id; "" if it gives none that may be sent back."""
    return _printable(request.headers.get(HEADER))


def _printable(given: object) -> str:
    return (
        given if isinstance(given, str) and given.isascii() and given.isprintable() and len(given) <= LONGEST_ID else ""
    )
