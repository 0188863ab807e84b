"""Access: bearer keys, networks that are trusted without a key, and the checks in front of handlers.

A trusted network stands for people's own programs. A page in a browser on a trusted machine, and a reverse proxy in
front of the gateway, send other people's requests from the same address, so such requests need a key.
"""

import socket
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import structlog
from aiohttp import web

from engines.errors import NotAllowed, RolloutGatewayError
from gateway.api import GONE, status_of
from gateway.config.schema import GatewayConfig
from gateway.http.guard.keys import Keys, SessionKey, digest

log = structlog.get_logger()

CLIENT: web.RequestKey[str] = web.RequestKey("client", str)
"""The client of a route for inference, whose rollouts are its own: a digest of its key, or `TRUSTED`."""
SESSION: web.RequestKey[str] = web.RequestKey("session", str)
"""The session that the path or the key of an agent's call names; "" for neither."""
TRUSTED = "trusted network"
"""In place of a key's name, where the client needs none."""

_REMEMBERED = 1024
_OF_PROXIES = (
    "Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto",
)  # fmt: skip
# Cross-site forms send these without asking the server first.
_FORM_TYPES = ("text/plain", "multipart/form-data")


class Routes(Protocol):
    """Handlers of one subject, each behind the check that it needs."""

    def add_routes(self, router: web.UrlDispatcher, access: "Access") -> None: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """Inference keys open generation, admin keys open everything; `for_...` wraps a handler with the check."""

    def __init__(self, config: GatewayConfig) -> None:
        self._trusted = tuple(config.trusted_networks)
        # Most requests come from few addresses, and to read one takes longer than all other checks.
        self._is_in_trusted_network = lru_cache(_REMEMBERED)(self._find_network)
        self._inference = Keys("gateway.inference_keys", config.inference_keys)
        self._admin = Keys("gateway.admin_keys", config.admin_keys)

    def for_inference(self, handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            request[CLIENT] = TRUSTED
            if not self._trusts(request):
                self.name_of(key := _given(request), admin=False)
                request[CLIENT] = digest(key)
            return await handler(request)

        return checked

    def for_inference_or(self, handler: Handler, otherwise: Handler) -> Handler:
        """Check for an inference key; a request without a key gets `otherwise`."""

        async def checked(request: web.Request) -> web.StreamResponse:
            try:
                self._key_of(request, admin=False)
            except NotAllowed:
                return await otherwise(request)
            return await handler(request)

        return checked

    def for_sessions(self, handler: Handler) -> Handler:
        """Check for an inference key, whose client has sessions of its own, also where it is in a trusted network."""

        async def checked(request: web.Request) -> web.StreamResponse:
            if has_session_key(request):
                raise NotAllowed("a session's key opens its turns alone: send the key that began it", known=True)
            self._key_of(request, admin=False)
            request[CLIENT] = digest(_given(request)) if self._signs(request) else TRUSTED
            return await handler(request)

        return checked

    def for_agents(self, handler: Handler) -> Handler:
        """Check for an inference key, or for the key of the session whose turn it is."""
        for_sessions = self.for_sessions(handler)

        async def checked(request: web.Request) -> web.StreamResponse:
            request[SESSION] = named = request.match_info.get("session", "")
            key = SessionKey.read(_given(request))
            if key is None:
                return await for_sessions(request)
            signer = self._inference.signer_of(key) or self._admin.signer_of(key)
            if signer is None and not (key.session and self._trusts(request)):
                raise NotAllowed("this is no key of a session: its signer's key is not known here", known=False)
            if named not in ("", key.session):
                raise NotAllowed(f"this key opens the session {key.session!r} alone", known=True)
            request[SESSION], request[CLIENT] = key.session, TRUSTED if signer is None else digest(signer)
            return await handler(request)

        return checked

    def session_key(self, request: web.Request, session: str) -> str:
        """Return the key of a session, signed by the key of this request."""
        return str(SessionKey.signed(session, _given(request) if self._signs(request) else ""))

    def _signs(self, request: web.Request) -> bool:
        """True if a request has a key that signs, and not only a trusted address."""
        key = _given(request)
        return bool(key and (self._inference.name_of(key) or self._admin.name_of(key)))

    def for_admin(self, handler: Handler) -> Handler:
        """Check for an admin key, and log each request, allowed or not, with the key's name and never its value."""

        async def checked(request: web.Request) -> web.StreamResponse:
            began, key, status = time.monotonic(), "", GONE
            try:
                key = self._key_of(request, admin=True)
                response = await handler(request)
                status = response.status
            except Exception as error:
                status = status_of(error) if isinstance(error, RolloutGatewayError) else 500
                key = error.key if isinstance(error, NotAllowed) else key
                raise
            finally:
                line = {"key": key or None, "peer": request.remote, "status": status}
                seconds = round(time.monotonic() - began, 3)
                log.info("admin request", method=request.method, path=request.path, seconds=seconds, **line)
            return response

        return checked

    def _key_of(self, request: web.Request, *, admin: bool) -> str:
        """Return the key's name. Raise `NotAllowed` unless the peer is trusted or its key opens the route."""
        return TRUSTED if self._trusts(request) else self.name_of(_given(request), admin=admin)

    def _trusts(self, request: web.Request) -> bool:
        """True for a request of a trusted peer, which no page of another site and no proxy may have sent."""
        headers, host, peer = request.headers, request.host, request.remote or ""
        if not self._is_in_trusted_network(peer) or _has_a_foreign_host(peer, host):
            return False
        if any(map(headers.__contains__, _OF_PROXIES)):
            return False
        # Browsers name the page that sends a request, and send a form of any site without asking.
        origin = headers.get("Origin")
        if origin is not None and _split(origin).netloc != host:
            return False
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return False
        return request.method == "GET" or request.content_type not in _FORM_TYPES

    def name_of(self, key: str, *, admin: bool) -> str:
        """Return the name of a key. Raise `NotAllowed` unless it opens the route."""
        if name := self._admin.name_of(key):
            return name
        name = self._inference.name_of(key)
        if not name:
            raise NotAllowed(
                "missing or wrong key: send 'Authorization: Bearer KEY', or have the operator add your network to "
                "gateway.trusted_networks (which never counts for web pages of other sites and through proxies)",
                known=False,
            )
        if admin:
            raise NotAllowed(
                "this key may generate only; weight and pause routes need an admin key", known=True, key=name
            )
        return name

    def _find_network(self, peer: str) -> bool:
        address = _address_of(peer)
        return address is not None and any(address in network for network in self._trusted)


def has_session_key(request: web.Request) -> bool:
    """True for a request with the key of a session, whether or not that opens anything."""
    return SessionKey.read(_given(request)) is not None


def _given(request: web.Request) -> str:
    """The key that a client sends; Anthropic's clients have a header of their own."""
    given = request.headers.get("Authorization") or request.headers.get("x-api-key") or ""
    return given.removeprefix("Bearer ").strip()


@lru_cache(_REMEMBERED)
def _has_a_foreign_host(remote: str, host: str) -> bool:
    """A page may have its site's name resolve to a loopback address, and is then of the same site as this server."""
    address = _address_of(remote)
    if address is None or not address.is_loopback:
        return False
    name = (_split(f"//{host}").hostname or "").rstrip(".").lower()
    return not (_address_of(name) or f".{name}".endswith(".localhost") or name in _own_names())


def _split(url: str) -> SplitResult:
    """The parts of a URL; none of text that is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _address_of(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address in a text, without its zone, and IPv4 as itself; None for text that is none."""
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _own_names() -> tuple[str, str]:
    name = socket.gethostname().lower()
    return name, name.partition(".")[0]
