"""The peer of a request, where its address says who sent it.

A trusted network stands for people's own programs. A page in a browser on a trusted machine, and a reverse proxy in
front of the gateway, send other people's requests from the same address, so such requests need a key.
"""

import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

_REMEMBERED = 1024
_OF_PROXIES = (
    "Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto",
)  # fmt: skip
# Cross-site forms send these without asking the server first.
_FORM_TYPES = ("text/plain", "multipart/form-data")


def direct_peer(request: web.Request) -> str | None:
    """Return the peer's address; None for a request that a page of another site or a proxy may have sent."""
    headers, host, remote = request.headers, request.host, request.remote
    if any(map(headers.__contains__, _OF_PROXIES)) or _has_a_foreign_host(remote or "", host):
        return None
    # Browsers name the page that sends a request, and send a form of any site without asking.
    origin = headers.get("Origin")
    if origin is not None and _split(origin).netloc != host:
        return None
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return None
    return None if request.method != "GET" and request.content_type in _FORM_TYPES else remote


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
