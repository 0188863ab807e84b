"""Who may call what: bearer keys, and networks that are trusted without one."""

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable

from pydantic import SecretStr

from engines.errors import NotAllowed
from gateway.config import GatewayConfig


class Access:
    """Inference keys open generation, admin keys open everything."""

    def __init__(self, config: GatewayConfig) -> None:
        self._trusted = tuple(config.trusted_networks)
        self._inference = _digests(config.inference_keys)
        self._admin = _digests(config.admin_keys)

    def check(self, peer: str | None, authorization: str | None, *, admin: bool) -> None:
        """Raise `NotAllowed` unless the peer is trusted or its key opens the route."""
        if self._is_trusted(peer):
            return
        digest = _digest((authorization or "").removeprefix("Bearer ").strip())
        if _is_among(digest, self._admin):
            return
        if not _is_among(digest, self._inference):
            raise NotAllowed(
                "missing or wrong key: send 'Authorization: Bearer KEY', or have the operator add your network to "
                "gateway.trusted_networks",
                known=False,
            )
        if admin:
            raise NotAllowed("this key may generate only; weight and pause routes need an admin key", known=True)

    def _is_trusted(self, peer: str | None) -> bool:
        if not peer:
            return False
        address = ipaddress.ip_address(peer.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def _digests(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    return tuple(_digest(key.get_secret_value()) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_among(digest: bytes, digests: tuple[bytes, ...]) -> bool:
    """All are compared, each in constant time, so that the time taken tells nothing of the keys."""
    matches = [secrets.compare_digest(digest, known) for known in digests]
    return any(matches)
