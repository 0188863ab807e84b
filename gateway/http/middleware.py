"""Passed by every request: its id, its metrics, and errors as replies in the client's dialect."""

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineRefused,
    RolloutGatewayError,
    TooManyRequests,
    WeightUpdateFailed,
)
from engines.trace_context import NO_TRACE, TRACE_CONTEXT, TRACEPARENT, trace_context
from gateway.api import GONE, body_of, error_body, status_of
from gateway.dialects.sampling import LONGEST_ID
from gateway.fleet.metrics import Metrics
from gateway.http.access import Handler
from gateway.http.json_body import reply

log = structlog.get_logger()

_ID = "X-Request-Id"
GIVEN_ID = web.RequestKey("given_id", str)
"""The client's own id; "" if it gives none that may be sent back."""
_HAS_BEGUN = web.RequestKey("has_begun", bool)


class Measurement:
    """Counts requests and their times."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @web.middleware
    async def measure(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The one place where errors become replies in the client's dialect, those that nobody foresaw too. A reply
        that has begun is cut off: a second head would be read as its content."""
        resource = request.match_info.route.resource
        route, began = resource.canonical if resource else "unknown", time.monotonic()
        headers, response = request.headers, None
        request[GIVEN_ID] = _printable(headers.get(_ID))
        TRACE_CONTEXT.set(trace_context(headers) if TRACEPARENT in headers else NO_TRACE)
        try:
            response = await handler(request)
        except ConnectionError:
            if request.transport is not None and not request.transport.is_closing():
                raise
        except Exception as error:
            response = _answer(request, error)
            if request.get(_HAS_BEGUN) and request.transport is not None:
                request.transport.close()
                response = None
        finally:
            self._metrics.requests(route, GONE if response is None else response.status).inc()
            self._metrics.request_seconds(route).observe(time.monotonic() - began)
        return web.Response(status=GONE) if response is None else response  # nobody reads the first


async def note_begin(request: web.Request, response: web.StreamResponse) -> None:
    """Note that the head of a reply is on its way, and name it by the id that the client has given."""
    request[_HAS_BEGUN] = True
    if given := request.get(GIVEN_ID):
        response.headers[_ID] = given


def request_id(request: web.Request, body: Mapping[str, Any] | None = None) -> str:
    """The header's id, then `request_id` of the body, then a random id."""
    own = body.get("request_id") if body else None
    return request[GIVEN_ID] or (own and _printable(own)) or secrets.token_hex(16)


def _printable(given: object) -> str:
    is_text = isinstance(given, str) and given.isascii() and given.isprintable() and len(given) <= LONGEST_ID
    return str(given) if is_text else ""


def _answer(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, RolloutGatewayError):
        return error_reply(error, body_of(error))
    if isinstance(error, web.HTTPException):
        return reply(error_body(f"{request.method} {request.path}: {error.reason}", error.status), error.status)
    log.error("request failed in a way that was not foreseen", path=request.path, exc_info=error)
    return reply(error_body(f"{request.path}: the gateway failed; its log has the reason", 500), 500)


def error_reply(error: RolloutGatewayError, body: Json) -> web.Response:
    """Log an error that the client is not to blame for, and return its reply with this body."""
    status = status_of(error)
    if isinstance(error, EngineError | WeightUpdateFailed | DeadlineExceeded) and not isinstance(error, EngineRefused):
        log.warning("request failed", status=status, error=str(error))
    response = reply(body, status)
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response
