"""Who may call what: bearer keys, and networks that are trusted without one."""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable

from pydantic import SecretStr

from engines.errors import NotAllowed
from gateway.config.schema import GatewayConfig


class Access:
    """Inference keys open generation, admin keys open everything."""

    def __init__(self, config: GatewayConfig) -> None:
        self._trusted = tuple(config.trusted_networks)
        self._inference = _digests(config.inference_keys)
        self._admin = _digests(config.admin_keys)
        self._store = tuple(_digest(key) for key in [store_key(config)] if key)

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
        """Whether this is the key that engines fetch weight versions with, which opens nothing else."""
        return _is_among(_digest(_bearer(authorization)), self._store)

    def _is_trusted(self, peer: str | None) -> bool:
        if not peer:
            return False
        address = ipaddress.ip_address(peer.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def store_key(config: GatewayConfig) -> str:
    """What an engine is given to fetch weight versions with, of which the admin key cannot be told; "" without one."""
    if not config.admin_keys:
        return ""
    return hmac.digest(config.admin_keys[0].get_secret_value().encode(), b"weight versions", "sha256").hex()


def _bearer(authorization: str | None) -> str:
    return (authorization or "").removeprefix("Bearer ").strip()


def _digests(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    return tuple(_digest(key.get_secret_value()) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_among(digest: bytes, digests: tuple[bytes, ...]) -> bool:
    """All are compared, each in constant time, so that the time taken tells nothing of the keys."""
    matches = [secrets.compare_digest(digest, known) for known in digests]
    return any(matches)
