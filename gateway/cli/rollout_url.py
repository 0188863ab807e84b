"""Calls of the commands to a rollout URL."""

import http.client
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from engines.engine import Json
from engines.errors import ConfigError, GatewayUnreachable, NotAllowed
from gateway.api import error_of
from gateway.opener import opener

_TIMEOUT_S = 10.0


def ask(url: str, path: str, key: str) -> Json:
    """Return the reply to a GET request. Raise the gateway's own error, or `GatewayUnreachable`."""
    with _answer(url, path, key, None, _TIMEOUT_S) as response:
        found: Json = json.load(response)
    return found


def download(url: str, path: str, key: str, body: Json, file: Path, timeout_s: float) -> None:
    """Write the reply to a POST request into a file, which is replaced once the reply is whole; `timeout_s` bounds each
    wait for a part of it. Raise as `ask`, and `ConfigError` for a file that cannot be written, before anything is
    asked."""
    part = file.with_name(f"{file.name}.part")
    try:
        out = part.open("wb")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    try:
        with out, _answer(url, path, key, json.dumps(body).encode(), timeout_s) as response:
            shutil.copyfileobj(response, out)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _answer(url: str, path: str, key: str, body: bytes | None, timeout_s: float) -> Iterator[IO[bytes]]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: expected http://host:port of a gateway")
    headers = {"Content-Type": "application/json"} if body else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url.rstrip("/") + path, body, headers)
        with opener().open(request, timeout=timeout_s) as response:
            yield response
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                wanted = "an admin key" if error.code == 403 else "another key" if key else "a key"
                raise NotAllowed(f"{url} wants {wanted}: give --api-key", known=error.code == 403) from error
            raise _refusal(url, path, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise GatewayUnreachable(f"no gateway answers at {url}: {error}; --url names another") from error


def _refusal(url: str, path: str, error: urllib.error.HTTPError) -> Exception:
    try:
        return error_of(error.code, json.load(error))
    except ValueError:
        return GatewayUnreachable(f"{url} answered HTTP {error.code} to {path}")
