"""Faults of replicas, clients and the gateway's process, each injected into a fleet that makes rollouts.

A fault gets the running fleet and returns when it is over; what died is started again by the fleet's keepers.
"""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil

from loadtests.chaos.clients.callers import Callers
from loadtests.chaos.process_fleet import ProcessFleet

_SLOW_READERS = 24
_SPARE_DESCRIPTORS = 4
_NEW_CONNECTIONS = 100


@dataclass(frozen=True, slots=True)
class Scene:
    """A fleet under load. `newcomers` are further clients that a fault may bring; `seconds` is the length of a fault
    that has one."""

    fleet: ProcessFleet
    newcomers: Callers
    seconds: float


RolloutFault = Callable[[Scene], Awaitable[None]]


async def killed(count: int, scene: Scene) -> None:
    await scene.fleet.kill(*range(count))


async def process_killed(scene: Scene) -> None:
    await scene.fleet.kill_processes(0)


async def stopped(scene: Scene) -> None:
    """Stop an engine's process with SIGSTOP; it goes on later, unless it was replaced."""
    await scene.fleet.suspend(0)
    try:
        await asyncio.sleep(scene.seconds)
    finally:
        scene.fleet.go_on()


async def misbehaves(faults: dict[str, Any], scene: Scene) -> None:
    """Let one engine have faults (`sim/faults.py`) for a while."""
    async with _faulty(scene.fleet.infos[0].url, faults):
        await asyncio.sleep(scene.seconds)


async def gateway_killed(scene: Scene) -> None:
    scene.fleet.kill_gateway()


async def slow_readers(scene: Scene) -> None:
    """Clients that ask for long streams and large replies, and read nothing."""
    samples = {"n": 8, "max_tokens": 1000, "ignore_eos": True, "logprobs": 5}
    bodies = [{"prompt": [[5, 6, place]], **samples, "stream": bool(place % 2)} for place in range(_SLOW_READERS)]
    readers = [_ask_unread(scene.fleet.url, body) for body in bodies]
    try:
        await asyncio.sleep(scene.seconds)
    finally:
        for reader in readers:
            reader.close()


async def descriptors_run_out(scene: Scene) -> None:
    """Lower the gateway's limit of open files to what it has open, while new clients connect."""
    gateway = psutil.Process(scene.fleet.gateway_pid)
    before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    limit = gateway.num_fds() + _SPARE_DESCRIPTORS
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    newcomers = [asyncio.create_task(scene.newcomers.completions()) for _ in range(_NEW_CONNECTIONS)]
    try:
        await asyncio.sleep(scene.seconds)
    finally:
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)
        await asyncio.gather(*newcomers)


@asynccontextmanager
async def _faulty(url: str, faults: dict[str, Any]) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session:
        try:
            await _put(session, url, faults)
            yield
        finally:
            await _put(session, url, {})


async def _put(session: aiohttp.ClientSession, url: str, faults: dict[str, Any]) -> None:
    async with session.put(url + "/faults", json=faults) as response:
        response.raise_for_status()


def _ask_unread(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request over a connection with a small buffer, from which nothing is read."""
    where = urlsplit(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((where.hostname, where.port))
    content = orjson.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


ROLLOUT_FAULTS: dict[str, RolloutFault] = {
    "replica killed": partial(killed, 1),
    "two replicas killed at once": partial(killed, 2),
    "replica's process killed": process_killed,
    "replica stopped (SIGSTOP) and continued": stopped,
    "429 with Retry-After": partial(misbehaves, {"status": 429, "retry_after_s": 2}),
    "500 with good health": partial(misbehaves, {"status": 500}),
    "black hole that answers /health": partial(misbehaves, {"wedged": True}),
    "black hole": partial(misbehaves, {"black_hole": True}),
    "garbage": partial(misbehaves, {"garbage": True}),
    "slow readers": slow_readers,
    "descriptors run out": descriptors_run_out,
    "gateway killed and restarted": gateway_killed,
}
