"""Serve's documented REST API, which the stock `serve` command uses too, and our control plane.

Without ray, whose import takes seconds.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import RolloutGatewayError
from gateway.config.placement import Nodes, Resource

_APPLICATIONS = "/api/serve/applications/"
_NODES = "/api/v0/nodes"
# Serve starts its controller within the first deploy.
_DEPLOY_TIMEOUT_S = 120.0
# The dashboard imports Serve at the first question about it, which takes half a minute on a busy machine.
_ASK_TIMEOUT_S = 60.0
# A dashboard that still starts answers 500 or closes connections; so does one whose Serve takes a minute to start.
_RECOVERY_S = 60.0
_RETRY_EACH_S = 0.5


class ClusterUnreachable(RolloutGatewayError):
    """No Ray dashboard answers at the address."""


class ClusterRefused(RolloutGatewayError):
    """The dashboard answered with an error."""


class ClusterTroubled(RolloutGatewayError):
    """Something is at the address: it has not answered in time, or answered 5xx or closed the connection for as long
    as was waited for it."""


@dataclass(frozen=True, slots=True)
class ServeApi:
    """Serve on the cluster whose dashboard is at `address`.

    Every call raises `ClusterUnreachable`, `ClusterRefused` or `ClusterTroubled` without an answer.
    """

    address: str
    token: str | None = None
    ask_timeout_s: float = _ASK_TIMEOUT_S
    recovery_s: float = _RECOVERY_S
    """Time in which a dashboard in trouble is asked again. Each call may be sent twice."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "ServeApi":
        """Find the cluster and token as Ray's own commands do."""
        address = environ.get("RAY_DASHBOARD_ADDRESS") or "http://127.0.0.1:8265"
        return cls(address.rstrip("/"), ray_token(environ))

    def is_up(self) -> bool:
        """Return True where a Ray dashboard answers, also with a demand for a token. Raises `ClusterTroubled`."""
        try:
            self._call("GET", "/api/version")
        except ClusterRefused:
            return True
        except ClusterUnreachable:
            return False
        return True

    def details(self) -> dict[str, Any]:
        """Return Serve's own report; it has no application where Serve does not run."""
        found: dict[str, Any] = json.loads(self._call("GET", _APPLICATIONS))
        return found

    def nodes(self, resource: Resource = "GPU") -> Nodes:
        """Return address and GPUs, or CPUs, of each node that lives, from the API of `ray list nodes`."""
        found = json.loads(self._call("GET", _NODES))["data"]["result"]["result"]
        alive = (node for node in found if node["state"] == "ALIVE")
        return [(node["node_ip"], float((node.get("resources_total") or {}).get(resource, 0))) for node in alive]

    def application(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.details()["applications"].get(name)
        return found

    def deploy(self, application: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> None:
        """Deploy an application and leave the cluster's other ones as they are. Without `settings` of its own Serve
        keeps those it runs with; where it does not run, it starts with them."""
        details = self.details()
        self._put(settings or details, [application, *_deployed(details, without=application["name"])])

    def delete(self, name: str) -> None:
        """Remove one application; the last one takes Serve with it."""
        details = self.details()
        if details["applications"].keys() - {name}:
            self._put(details, _deployed(details, without=name))
        else:
            self._call("DELETE", _APPLICATIONS, timeout_s=_DEPLOY_TIMEOUT_S)

    def _put(self, settings: Mapping[str, Any], applications: Sequence[Mapping[str, Any]]) -> None:
        """Have Serve run these applications and no other."""
        document = {key: settings[key] for key in ("proxy_location", "http_options")} | {"applications": applications}
        self._call("PUT", _APPLICATIONS, json.dumps(document).encode(), timeout_s=_DEPLOY_TIMEOUT_S)

    def _call(self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
        deadline = time.monotonic() + self.recovery_s
        while True:
            try:
                return self._ask(method, path, body, timeout_s or self.ask_timeout_s)
            except ClusterTroubled:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_EACH_S)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.address + path, method=method, data=body, headers=headers)
        try:
            return _send(request, timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                message = self._refusal(f"{method} {path}", error.code, error.read().decode(errors="replace"))
            raise (ClusterTroubled if error.code >= 500 else ClusterRefused)(message) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._no_answer(f"{method} {path}", getattr(error, "reason", error), timeout_s) from error

    def _no_answer(self, call: str, reason: object, timeout_s: float) -> RolloutGatewayError:
        if isinstance(reason, TimeoutError):
            return ClusterTroubled(
                f"the Ray dashboard at {self.address} has not answered {call} within {timeout_s:.0f} s; "
                "try again when the machine is less busy, or end that Ray: ray stop"
            )
        if isinstance(reason, (ConnectionResetError, BrokenPipeError, http.client.HTTPException)):
            return ClusterTroubled(f"the Ray dashboard at {self.address} closed the connection of {call} ({reason})")
        words = getattr(reason, "strerror", None) or reason
        return ClusterUnreachable(
            f"no Ray dashboard answers at {self.address} ({words}): start a fleet with rollout-gateway up -c FILE, or "
            "name another address in RAY_DASHBOARD_ADDRESS"
        )

    def _refusal(self, call: str, status: int, text: str) -> str:
        if status in (401, 403):
            return (
                f"{self.address} answered {status}: this cluster wants a token: set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH, or copy the head node's ~/.ray/auth_token here"
            )
        return f"{self.address} answered {status} to {call}: {text.strip()[-2000:]}"


def ask_control_plane(control_url: str, path: str) -> dict[str, Any]:
    """Return a reply of the control plane; empty when it is off or does not answer."""
    try:
        found: dict[str, Any] = json.loads(_send(urllib.request.Request(control_url + path), _ASK_TIMEOUT_S))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return found


def _send(request: urllib.request.Request, timeout_s: float) -> bytes:
    with opener().open(request, timeout=timeout_s) as response:
        answer: bytes = response.read()
        return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirection as the error that it then is: urllib would send the key along, to any host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener() -> urllib.request.OpenerDirector:
    """Return an opener without the environment's proxy: both ends are inside the cluster's network."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def ray_token(environ: Mapping[str, str]) -> str | None:
    """Find the token where Ray's own commands look; None without one, or where tokens are off."""
    if environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := environ.get("RAY_AUTH_TOKEN"):
        return token
    path = environ.get("RAY_AUTH_TOKEN_PATH") or str(Path(environ.get("HOME", "~")).expanduser() / ".ray/auth_token")
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _deployed(details: Mapping[str, Any], without: str) -> list[dict[str, Any]]:
    """Return the documents of the other applications: Serve removes each that a deploy leaves out."""
    found = {name: app.get("deployed_app_config") for name, app in details["applications"].items()}
    return [config for name, config in found.items() if config and name != without]
