"""Addresses of a configuration that this machine cannot bind now. Serve would find them after its start alone."""

import socket
from collections.abc import Iterator
from contextlib import closing

from gateway.config.schema import Config


def unbindable(config: Config, gateway_port: int | None = None, serve_port: int | None = None) -> list[str]:
    """List the addresses of the gateway and of Serve's proxy that cannot be bound, with the remedy.

    A running gateway has `gateway_port` already, and a running Serve `serve_port`.
    """
    gateway, serve = config.gateway, config.serve
    found: list[str] = []
    if gateway.port != gateway_port:
        found += _failures("gateway.host", gateway.host, "gateway.port", gateway.port)
    if serve.proxy_location != "Disabled" and serve.http_port != serve_port:
        found += _failures("serve.http_host", serve.http_host, "serve.http_port", serve.http_port)
    return found


def is_here(host: str) -> bool:
    """Return True for an address of this machine. A forwarded port makes any cluster's dashboard look local."""
    return not any(_failures("", host, "", 0))


def _failures(host_key: str, host: str, port_key: str, port: int) -> Iterator[str]:
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with closing(socket.socket(family, kind)) as probe:
                # As servers do it: an address whose last connections have just been closed is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        yield (
            f"{host_key} = {host!r}, {port_key} = {port}: cannot be bound here ({error.strerror}): "
            f"set another {port_key} or {host_key}, or end the process that listens there"
        )
