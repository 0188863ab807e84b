"""Connections are handed to the worker that has the fewest, and none is lost while no worker takes it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.http.workers.link import Link
from gateway.http.workers.porter import Porter, listening_at


class _Worker:
    """Stands where a link does; the handed connections by their peers' ports."""

    def __init__(self, has: int = 0) -> None:
        self.had = has
        self.ports: list[int] = []
        self.is_full = False

    @property
    def num_connections(self) -> int:
        return self.had + len(self.ports)

    def hand(self, connection: socket.socket) -> None:
        if self.is_full:
            raise BlockingIOError
        self.ports.append(connection.getpeername()[1])


@asynccontextmanager
async def standing(serving: list[_Worker]) -> AsyncIterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        porter = Porter([listening], lambda: cast(list[Link], serving))
        try:
            yield listening.getsockname()
        finally:
            porter.close()


async def connected(address: tuple[str, int], number: int) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    clients = [socket.socket() for _ in range(number)]
    for client in clients:
        client.setblocking(False)
        await loop.sock_connect(client, address)
    return clients


async def until_handed(workers: list[_Worker], number: int) -> None:
    async with asyncio.timeout(20):
        while sum(len(worker.ports) for worker in workers) < number:
            await asyncio.sleep(0.01)


def closed(clients: list[socket.socket]) -> None:
    for client in clients:
        client.close()


async def test_all_addresses_of_the_host_are_listened_at_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["127.0.0.1", "203.0.113.7", "127.0.0.2"]  # the second is not this machine's

    def found(host: str, port: int, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    listening = await listening_at("two.invalid", 0)
    bound = [one.getsockname() for one in listening]
    assert bound == [("127.0.0.1", bound[0][1]), ("127.0.0.2", bound[0][1])]
    workers = [_Worker(), _Worker()]
    porter = Porter(listening, lambda: cast(list[Link], workers))
    clients = [*await connected(bound[0], 2), *await connected(bound[1], 2)]
    await until_handed(workers, 4)
    assert [len(worker.ports) for worker in workers] == [2, 2]
    porter.close()
    closed(clients)
    del addresses[0], addresses[1]
    with pytest.raises(OSError, match="assign requested address"):
        await listening_at("two.invalid", 0)


async def test_connections_wait_while_no_worker_serves_or_takes_them_and_keep_their_order() -> None:
    serving: list[_Worker] = []
    async with standing(serving) as address:
        clients = await connected(address, 3)
        await asyncio.sleep(0.05)
        worker = _Worker()
        worker.is_full = True
        serving.append(worker)
        await asyncio.sleep(0.3)
        assert not worker.ports
        worker.is_full = False
        await until_handed(serving, 3)
        assert worker.ports == [client.getsockname()[1] for client in clients]
        closed(clients)
