"""Faults of real engines for the simulated engine, set at its start or while it runs (PUT /faults)."""

import os
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from engines.engine import Json

_GENERATION = ("/v1/completions", "/v1/chat/completions")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults(BaseModel):
    """The faults of each request for tokens; none unless set."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    status: int | None = None
    """HTTP status of the answer, such as 429, 401 or 500."""
    retry_after_s: int | None = None
    """Retry-After header beside `status`."""
    garbage: bool = False
    """True to answer 200 with text that is no JSON."""
    no_choices: bool = False
    """True to answer 200 with `choices: []`."""
    doubled_chunks: bool = False
    """True to send every chunk of a stream twice."""
    crlf: bool = False
    """True to end the lines of event streams with CRLF, as some proxies do."""
    wedged: bool = False
    """True to make no token, while /health and /metrics answer."""
    deadly_prompt: str | None = None
    """Text whose request ends the process."""


class FaultInjector:
    """Applies faults to an application's routes for tokens. `die` ends the process; tests replace it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.die: Callable[[], Awaitable[None]] = _exit

    async def put(self, request: web.Request) -> web.Response:
        self.faults = Faults.model_validate(orjson.loads(await request.read()))
        return web.Response(body=self.faults.model_dump_json().encode(), content_type="application/json")

    @web.middleware
    async def inject(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _GENERATION:
            return await handler(request)
        faults = self.faults
        if faults.deadly_prompt is not None and faults.deadly_prompt.encode() in await request.read():
            await self.die()
        if faults.status is not None:
            headers = {} if faults.retry_after_s is None else {"Retry-After": str(faults.retry_after_s)}
            error = {"message": f"injected fault {faults.status}", "type": "Injected", "param": None}
            body = orjson.dumps({"error": error | {"code": faults.status}})
            return web.Response(body=body, status=faults.status, headers=headers, content_type="application/json")
        if faults.garbage:
            return web.Response(text="<html>a proxy's page</html>", content_type="text/html")
        if faults.no_choices:
            return web.Response(body=orjson.dumps({"choices": [], "usage": None}), content_type="application/json")
        return await handler(request)

    def events(self, chunk: Json) -> bytes:
        """Return a chunk with the faults of streams."""
        line_end = b"\r\n" if self.faults.crlf else b"\n"
        event = b"data: " + orjson.dumps(chunk) + line_end + line_end
        return event * 2 if self.faults.doubled_chunks else event


async def _exit() -> None:
    os._exit(1)
