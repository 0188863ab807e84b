"""Calls of the commands to a rollout URL."""

import json
import urllib.error
import urllib.request

from engines.engine import Json
from engines.errors import GatewayUnreachable, NotAllowed
from gateway.api import error_of

_TIMEOUT_S = 10.0


def ask(url: str, path: str, key: str) -> Json:
    """Return the reply to a GET request. Raise the gateway's own error, or `GatewayUnreachable`."""
    request = urllib.request.Request(url.rstrip("/") + path)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            found: Json = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                raise NotAllowed(f"{url} wants a key: give --api-key", known=error.code == 403) from error
            raise _refusal(url, path, error) from error
    except (OSError, ValueError) as error:
        raise GatewayUnreachable(f"no gateway answers at {url}: {error}; --url names another") from error
    return found


def _refusal(url: str, path: str, error: urllib.error.HTTPError) -> Exception:
    try:
        return error_of(error.code, json.load(error))
    except ValueError:
        return GatewayUnreachable(f"{url} answered HTTP {error.code} to GET {path}")
