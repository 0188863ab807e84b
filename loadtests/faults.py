"""What is done to a fleet, one fault after the other: each hurts it at a certain moment of a weight update.

A fault gets the world as it is and returns when its own part is over; the caller watches how the fleet comes back.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from loadtests.witness import Witness

Json = dict[str, Any]

_RETRY_S = 0.2
_UNAIDED_S = 90.0
_TENSORS = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 4]]}


class CallFailed(Exception):
    """A weight call that was answered with an error, or not at all."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"{path}: {status} {text[:300]}")
        self.status = status


class Hung(Exception):
    """A call that was not answered within the bound."""


class Trainer:
    """The calls of one trainer session, each bounded. The simulated engines are told of tensors and sent none."""

    def __init__(self, url: str, witness: Witness, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._witness = witness
        self._session = session

    async def join(self) -> None:
        """Open a transfer group over the fleet as it is now."""
        size = (await self.call("GET", "/get_world_size"))["world_size"]
        info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": size + 1}
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    async def start(self) -> None:
        await self.call("POST", "/start_weight_update", {})

    async def send(self, **otherwise: Any) -> None:
        """Tell of the tensors; `otherwise` says other things of them than are true."""
        await self.call("POST", "/update_weights", {"update_info": {**_TENSORS, **otherwise}})

    async def finish(self) -> None:
        reply = await self.call("POST", "/finish_weight_update", {})
        self._witness.version = max(self._witness.version, reply["weight_version"])

    async def update(self) -> None:
        await self.start()
        await self.send()
        await self.finish()

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise CallFailed(path, response.status, text)
                answer: Json = await response.json()
                return answer
        except TimeoutError as error:
            raise Hung(f"{path} was not answered within the bound") from error
        except aiohttp.ClientError as error:
            raise CallFailed(path, 0, repr(error)) from error


@dataclass(frozen=True, slots=True)
class World:
    """The running application."""

    url: str
    trainer: Trainer
    size: int

    async def serves(self) -> bool:
        """Whether every replica does."""
        return [replica["state"] for replica in await self.replicas()] == ["SERVING"] * self.size

    async def replicas(self) -> list[Json]:
        """As /status tells of them, those that serve first."""
        found: list[Json] = (await self.trainer.call("GET", "/status"))["replicas"]
        return sorted(found, key=lambda replica: replica["state"] != "SERVING")

    async def engine_pid(self) -> int:
        """The engine server of one replica, a serving one where there is one: the guard's only child."""
        guard = (await self.replicas())[0]["pid"]
        return int(psutil.Process(guard).children()[0].pid)

    def gateway_pid(self) -> int:
        port = urlsplit(self.url).port
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
        raise CallFailed("gateway", 0, f"nobody listens on port {port}")


Fault = Callable[[World], Awaitable[None]]


async def killed_before(world: World) -> None:
    os.kill(await world.engine_pid(), signal.SIGKILL)
    with refused():
        await world.trainer.update()


async def killed_during(world: World) -> None:
    await world.trainer.start()
    await world.trainer.send()
    os.kill(await world.engine_pid(), signal.SIGKILL)
    with refused():
        await world.trainer.finish()


async def killed_after(world: World) -> None:
    """Its successor starts with the checkpoint, and has to find the current version without the trainer."""
    await world.trainer.update()
    pid = await world.engine_pid()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: _is_replaced(world, pid), _UNAIDED_S, "a successor with the current weights")


async def wedged_during(world: World) -> None:
    pid = await world.engine_pid()
    await world.trainer.start()
    os.kill(pid, signal.SIGSTOP)
    with refused():
        await world.trainer.send()
        await world.trainer.finish()


async def trainer_dies(world: World) -> None:
    """Nobody ends its update: the fleet has to, and to go back to the version before."""
    await world.trainer.start()
    await world.trainer.send()
    await until(world.serves, _UNAIDED_S, "the fleet to serve again without its trainer")


async def gateway_killed(world: World) -> None:
    await world.trainer.start()
    await world.trainer.send()
    os.kill(world.gateway_pid(), signal.SIGKILL)
    with refused():
        await world.trainer.finish()


async def wrong_shapes(world: World) -> None:
    await world.trainer.start()
    with refused(400):
        await world.trainer.send(shapes=[[4, 5]])


async def two_trainers(world: World) -> None:
    await world.trainer.start()
    with refused(409):
        await world.trainer.start()
    await world.trainer.send()
    await world.trainer.finish()


async def new_session(world: World) -> None:
    await world.trainer.start()
    await world.trainer.send()
    await world.trainer.join()
    await world.trainer.update()


async def _is_replaced(world: World, pid: int) -> bool:
    return await world.serves() and not psutil.pid_exists(pid)


FAULTS: dict[str, Fault] = {
    "replica killed before an update": killed_before,
    "replica killed during the transfer": killed_during,
    "replica killed after the commit": killed_after,
    "replica wedged during the transfer": wedged_during,
    "trainer dies in the middle": trainer_dies,
    "gateway killed in the middle": gateway_killed,
    "tensors of wrong shapes": wrong_shapes,
    "two trainers at once": two_trainers,
    "a new trainer session in the middle": new_session,
}


@contextmanager
def refused(status: int | None = None) -> Iterator[None]:
    """What is done here may, or with `status` must, be answered with an error."""
    try:
        yield
    except CallFailed as error:
        if status is not None and error.status != status:
            raise
    else:
        if status is not None:
            raise CallFailed("this call", 200, f"was to be refused with {status}")


async def until(condition: Callable[[], Awaitable[bool]], bound_s: float, what: str) -> None:
    """Returns when the condition holds; `Hung` after the bound. A gateway that is away is asked again."""
    try:
        async with asyncio.timeout(bound_s):
            while True:
                try:
                    if await condition():
                        return
                except CallFailed:
                    pass
                await asyncio.sleep(_RETRY_S)
    except TimeoutError as error:
        raise Hung(f"{what}: not within {bound_s:g} s") from error
