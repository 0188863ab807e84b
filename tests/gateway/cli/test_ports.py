"""Addresses that are taken, or that this machine does not have."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cli.up import unbindable
from gateway.config.schema import Config


def found(**tree: Any) -> list[str]:
    tree.setdefault("gateway", {"port": 0})
    tree.setdefault("serve", {"http_port": 0})
    return unbindable(Config.model_validate({"engine": {"kind": "sim"}} | tree))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.0.1 at which a process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_the_port_of_serve_counts_where_serve_has_a_proxy(taken: int) -> None:
    (line,) = found(serve={"http_port": taken})
    assert line.startswith(f"serve.http_host = '127.0.0.1', serve.http_port = {taken}: cannot be bound here")
    assert found(serve={"http_port": taken, "proxy_location": "Disabled"}) == []


def test_a_port_whose_last_connection_was_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert found(gateway={"port": port}) == []


def test_an_address_that_this_machine_does_not_have() -> None:
    (line,) = found(gateway={"host": "203.0.113.7", "port": 0, "inference_keys": ["a" * 32], "admin_keys": ["b" * 32]})
    reason = "cannot be bound here (Cannot assign requested address)"
    assert line.startswith(f"gateway.host = '203.0.113.7', gateway.port = 0: {reason}")
