"""Faults of real engines for the simulated engine, set at its start or while it runs (PUT /faults)."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict

_GENERATION = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
_CONTROL = "/faults"
_LOOK_S = 0.02  # how often a held request looks for the end of its fault
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults(BaseModel):
    """The faults of each request for tokens; none unless set."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    status: int | None = None
    """HTTP status of the answer, such as 429, 401 or 500."""
    status_for: str | None = None
    """Text of the requests that get `status`; unset for all."""
    retry_after_s: int | None = None
    """Retry-After header beside `status`."""
    garbage: bool = False
    """True to answer 200 with text that is no JSON."""
    wedged: bool = False
    """True to make no token, while /health and /metrics answer."""
    black_hole: bool = False
    """True to make no token and to answer no request, /health included, while connections stay open."""
    held: str | None = None
    """Text of a path or a body: requests with it wait while this is set. PUT /faults answers with their number."""
    deadly_prompt: str | None = None
    """Text whose request ends the process."""

    @property
    def stops_tokens(self) -> bool:
        """Return True if no token is made."""
        return self.wedged or self.black_hole


class FaultInjector:
    """Applies faults to an application's routes for tokens. `die` ends the process; tests replace it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.num_held = 0
        self.die: Callable[[], Awaitable[None]] = _exit

    async def put(self, request: web.Request) -> web.Response:
        self.faults = Faults.model_validate(orjson.loads(await request.read()))
        answer = self.faults.model_dump() | {"num_held": self.num_held}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    @web.middleware
    async def inject(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        while self.faults.black_hole and request.path != _CONTROL:  # noqa: ASYNC110 tests set the faults themselves
            await asyncio.sleep(_LOOK_S)
        if self.faults.held is not None and request.path != _CONTROL:
            await self._hold(request.path.encode() + await request.read())
        if request.path not in _GENERATION:
            return await handler(request)
        faults = self.faults
        if faults.deadly_prompt is not None and faults.deadly_prompt.encode() in await request.read():
            await self.die()
        if faults.status is not None and (faults.status_for or "").encode() in await request.read():
            headers = {} if faults.retry_after_s is None else {"Retry-After": str(faults.retry_after_s)}
            error = {"message": f"injected fault {faults.status}", "type": "Injected", "param": None}
            body = orjson.dumps({"error": error | {"code": faults.status}})
            return web.Response(body=body, status=faults.status, headers=headers, content_type="application/json")
        if faults.garbage:
            return web.Response(text="<html>a proxy's page</html>", content_type="text/html")
        return await handler(request)

    async def _hold(self, content: bytes) -> None:
        """Wait while a fault holds requests of this content."""
        self.num_held += 1
        try:
            while self.faults.held is not None and self.faults.held.encode() in content:  # noqa: ASYNC110 tests set it
                await asyncio.sleep(_LOOK_S)
        finally:
            self.num_held -= 1


async def _exit() -> None:
    os._exit(1)
