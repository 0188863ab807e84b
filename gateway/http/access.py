"""Access: bearer keys, networks that are trusted without a key, and the checks in front of handlers."""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from typing import Protocol

from aiohttp import web
from pydantic import SecretStr

from engines.errors import NotAllowed
from gateway.config.schema import GatewayConfig
from gateway.http.direct_peer import direct_peer


class Routes(Protocol):
    """Handlers of one subject, each behind the check that it needs."""

    def add_routes(self, router: web.UrlDispatcher, access: "Access") -> None: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Need(StrEnum):
    """The key that a route needs from clients that are not trusted without one."""

    NONE = "none"
    OPTIONAL = "optional"  # without a key it says less
    INFERENCE = "inference"
    ADMIN = "admin"
    STORE = "store"


class Access:
    """Inference keys open generation, admin keys open everything; `for_...` wraps a handler with the check.

    `need_of` reports the check and the handler behind it, for the description of the routes.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._trusted = tuple(config.trusted_networks)
        self._inference = _digests(config.inference_keys)
        self._admin = _digests(config.admin_keys)
        self._store = tuple(_digest(key) for key in [store_key(config)] if key)
        self._needs: dict[Handler, tuple[Need, Handler]] = {}

    def need_of(self, handler: Handler) -> tuple[Need, Handler]:
        """Return the key that a route needs, and its own handler behind the check."""
        return self._needs.get(handler, (Need.NONE, handler))

    def for_inference(self, handler: Handler) -> Handler:
        return self._noted(Need.INFERENCE, handler, self._checked(handler, admin=False))

    def for_inference_or(self, handler: Handler, otherwise: Handler) -> Handler:
        """For inference keys; requests without one get the other handler."""

        async def checked(request: web.Request) -> web.StreamResponse:
            is_known = self.admits(direct_peer(request), request.headers.get("Authorization"))
            return await (handler if is_known else otherwise)(request)

        return self._noted(Need.OPTIONAL, handler, checked)

    def for_admin(self, handler: Handler) -> Handler:
        return self._noted(Need.ADMIN, handler, self._checked(handler, admin=True))

    def for_store(self, handler: Handler) -> Handler:
        """For admin keys, and for the key that engines fetch weight versions with."""
        for_admin = self.for_admin(handler)

        async def checked(request: web.Request) -> web.StreamResponse:
            opens = self.opens_store(request.headers.get("Authorization"))
            return await (handler if opens else for_admin)(request)

        return self._noted(Need.STORE, handler, checked)

    def check(self, peer: str | None, authorization: str | None, *, admin: bool) -> None:
        """Raise `NotAllowed` unless the peer is trusted or its key opens the route."""
        if self._is_trusted(peer):
            return
        digest = _digest(_bearer(authorization))
        if _is_among(digest, self._admin):
            return
        if not _is_among(digest, self._inference):
            raise NotAllowed(
                "missing or wrong key: send 'Authorization: Bearer KEY', or have the operator add your network to "
                "gateway.trusted_networks (which never counts for web pages of other sites and through proxies)",
                known=False,
            )
        if admin:
            raise NotAllowed("this key may generate only; weight and pause routes need an admin key", known=True)

    def admits(self, peer: str | None, authorization: str | None) -> bool:
        """Return True for a trusted peer or a key that opens generation."""
        try:
            self.check(peer, authorization, admin=False)
        except NotAllowed:
            return False
        return True

    def opens_store(self, authorization: str | None) -> bool:
        """True for the key that engines fetch weight versions with; it opens nothing else."""
        return _is_among(_digest(_bearer(authorization)), self._store)

    def _checked(self, handler: Handler, *, admin: bool) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            self.check(direct_peer(request), request.headers.get("Authorization"), admin=admin)
            return await handler(request)

        return checked

    def _noted(self, need: Need, handler: Handler, checked: Handler) -> Handler:
        self._needs[checked] = need, handler
        return checked

    def _is_trusted(self, peer: str | None) -> bool:
        if not peer:
            return False
        address = ipaddress.ip_address(peer.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def store_key(config: GatewayConfig) -> str:
    """The key that engines fetch weight versions with, derived from the admin key; "" if there is no admin key."""
    if not config.admin_keys:
        return ""
    return hmac.digest(config.admin_keys[0].get_secret_value().encode(), b"weight versions", "sha256").hex()


def _bearer(authorization: str | None) -> str:
    return (authorization or "").removeprefix("Bearer ").strip()


def _digests(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    return tuple(_digest(key.get_secret_value()) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _is_among(digest: bytes, digests: tuple[bytes, ...]) -> bool:
    """Compare with all, each in constant time, so that the time taken reveals nothing about the keys."""
    matches = [secrets.compare_digest(digest, known) for known in digests]
    return any(matches)
