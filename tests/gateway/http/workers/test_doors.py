"""Connections that are handed to a worker are counted, also those that it has no descriptor for."""

import asyncio
import socket

from aiohttp import web

from gateway.http.workers.doors import HandedDoor


async def test_a_connection_that_came_without_a_descriptor_counts_as_taken_and_ended() -> None:
    hands, takes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    door = HandedDoor(runner, takes, None)
    await door.start()
    hands.send(b"c")  # as the kernel gives it to a process without descriptors
    async with asyncio.timeout(20):
        while not door.taken:
            await asyncio.sleep(0.01)
    assert (door.taken, door.num_connections) == (1, 0)
    hands.close()
    await runner.cleanup()
