"""The audit log: a line for each request to an admin route, allowed or not, with the key's name and never its value."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import orjson
import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import ConfigError, NotAllowed, RolloutGatewayError
from gateway.api import status_of

log = structlog.get_logger()

_GONE = 499
_FAILED = 500


class Audit:
    """Writes to a file where one is given, else to the gateway's log."""

    def __init__(self, path: str | None) -> None:
        """Raise `ConfigError` where the file cannot be written."""
        self._path = path
        if path:
            try:
                _append(path, {"at": round(time.time(), 3), "event": "gateway started"})
            except OSError as error:
                raise ConfigError(f"gateway.audit_file = {path!r} cannot be written: {error.strerror}") from error

    async def noted(
        self,
        request: web.Request,
        check: Callable[[], str],
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Return the handler's reply after the check, which returns the key's name, once a line about it is written."""
        at, began, key, status = time.time(), time.monotonic(), "", _GONE
        try:
            key = check()
            response = await handler(request)
            status = response.status
            return response
        except RolloutGatewayError as error:
            status = status_of(error)
            if isinstance(error, NotAllowed):
                key = error.key
            raise
        except Exception:
            status = _FAILED
            raise
        finally:
            await self._write(request, at, time.monotonic() - began, key, status)

    async def _write(self, request: web.Request, at: float, seconds: float, key: str, status: int) -> None:
        line: Json = {
            "at": round(at, 3),
            "method": request.method,
            "path": request.path,
            "key": key or None,
            "peer": request.remote,
            "status": status,
            "seconds": round(seconds, 3),
        }
        if self._path is None:
            log.info("admin request", **line)
            return
        try:
            await asyncio.to_thread(_append, self._path, line)  # a disk that hangs holds up no tokens
        except OSError as error:
            log.error("the audit file cannot be written: the line is here", file=self._path, error=str(error), **line)


def _append(path: str, line: Json) -> None:
    """Open the file for each line, so that it may be moved away at any time. Its owner alone may read it."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", 0) as file:
        file.write(orjson.dumps(line) + b"\n")
