"""What is done to a fleet, one fault after the other: each hurts it at a certain moment of a weight update.

A fault gets the world as it is and returns when its own part is over; the caller watches how the fleet comes back.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft, raw
from loadtests.chaos.witness import Witness

Json = dict[str, Any]

DISK_FULL = "disk full in the weight store"

_RETRY_S = 0.2
_FILLINGS = 5
_PUSHES = 20
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

    async def push(self, *, rolling: bool = False, damaged: bool = False) -> None:
        """Bring a version through the store; `damaged` changes a byte of it after its digests were taken."""
        store = await self.call("GET", "/v1/weight_store")
        draft, owner = claim_draft(Path(store["folder"]))
        try:
            written = Draft(draft, store["model"])
            written.add([raw("weight", "float32", [4, 4], bytes(64))])
            written.finish()
            if damaged:
                _change_last_byte(next(draft.glob("*.safetensors")))
            body = {"transport": "store", "snapshot": draft.name, "rolling": rolling}
            reply = await self.call("POST", "/v1/weight_updates", body)
            self._witness.version = max(self._witness.version, reply["weight_version"])
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            os.close(owner)

    async def tell_engine(self, replica: Json, method: str, **arguments: Any) -> None:
        """Have the simulated engine of one replica misbehave, or stop it."""
        await self.call("POST", "/collective_rpc", {"method": method, "kwargs": arguments}, url=replica["url"])

    async def call(self, method: str, path: str, body: Json | None = None, url: str = "") -> Json:
        try:
            async with self._session.request(method, (url or self._url) + path, json=body) as response:
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
        """The engine server of one replica, a serving one where there is one."""
        return engine_of((await self.replicas())[0])

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


async def damaged_on_the_way(world: World) -> None:
    """One replica receives other bytes than its peers."""
    replica = (await world.replicas())[0]
    await world.trainer.tell_engine(replica, "damage", name="weight")
    await world.trainer.start()
    await world.trainer.send()
    with refused(424):
        await world.trainer.finish()
    await world.trainer.tell_engine(replica, "heal")


async def damaged_in_the_store(world: World) -> None:
    with refused(400):
        await world.trainer.push(damaged=True)
    await world.trainer.push()


async def disk_full(world: World) -> None:
    """An update over the group goes on without a copy; one through the store is told so, and leaves nothing behind."""
    folder = Path((await world.trainer.call("GET", "/v1/weight_store"))["folder"])
    with _filled(folder) as fill:
        await world.trainer.update()
        for _ in range(_FILLINGS):  # a version that the update made superfluous may go, and leaves room
            fill()
            if await _finds_no_room(world.trainer):
                return
    raise AssertionError(f"{_FILLINGS} pushes found room on a full disk")


async def _finds_no_room(trainer: Trainer) -> bool:
    """False where the push was taken; any other failure than the one looked for is raised."""
    try:
        await trainer.push()
    except StoreFailed as error:
        if "is full" not in str(error):
            raise
        return True
    except CallFailed as error:
        if error.status != 409:  # where the draft just fitted, and its promotion does not
            raise
        return True
    return False


async def returns_with_old_weights(world: World) -> None:
    """One that was silent while the others took a version: it has to take it before it serves."""
    silent = (await world.replicas())[0]
    pid = engine_of(silent)
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: _is_out(world, silent), _UNAIDED_S, "the silent replica to be left out")
        await world.trainer.push()
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(world.serves, _UNAIDED_S, "the one that was silent to serve")


async def killed_while_rolling(world: World) -> None:
    """The one whose turn it is dies: the update goes on without it, and its successor catches up."""
    async with _rolling(world) as (pushing, leaving):
        os.kill(engine_of(leaving), signal.SIGKILL)
        await pushing
    await until(world.serves, _UNAIDED_S, "a successor with the current weights")


async def fails_while_rolling(world: World) -> None:
    """One replica holds other weights than it says: who took the version before it is taken back."""
    replica = (await world.replicas())[-1]
    await world.trainer.tell_engine(replica, "corrupt_loads", on=True)
    with refused(424):
        await world.trainer.push(rolling=True)
    await world.trainer.tell_engine(replica, "corrupt_loads", on=False)
    await until(world.serves, _UNAIDED_S, "the fleet to be back at the version before")


async def trainer_dies_while_rolling(world: World) -> None:
    async with _rolling(world) as (pushing, _):
        pushing.cancel()
    await until(world.serves, _UNAIDED_S, "the fleet to be back at the version before")


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


async def _is_out(world: World, replica: Json) -> bool:
    """Whether the replica is so far gone that an update passes it by."""
    return replica["replica_id"] not in {found["replica_id"] for found in await world.replicas()}


@asynccontextmanager
async def _rolling(world: World) -> "AsyncIterator[tuple[asyncio.Task[None], Json]]":
    """A rolling update, when the first replica serves the new version and another one leaves; that one.

    One that was over unseen is followed by another.
    """
    for _ in range(_PUSHES):
        pushing = asyncio.create_task(world.trainer.push(rolling=True))
        try:
            while not pushing.done():
                replicas = await world.replicas()
                leaving = [replica for replica in replicas if replica["state"] == "UPDATING"]
                versions = {replica["weight_version"] for replica in replicas if replica["state"] == "SERVING"}
                if leaving and len(versions) > 1:
                    yield pushing, leaving[0]
                    return
            pushing.result()
        finally:
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
    raise AssertionError(f"in {_PUSHES} rolling updates no replica was seen to leave")


@contextmanager
def _filled(folder: Path) -> Iterator[Callable[[], None]]:
    """Takes every byte of the file system that holds the folder; the function yielded does so again."""
    filler = folder / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        fill()
        yield fill
    finally:
        filler.unlink()


def engine_of(replica: Json) -> int:
    """Return the engine server's process."""
    return int(replica["pid"])


def _change_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FAULTS: dict[str, Fault] = {
    "replica killed before an update": killed_before,
    "replica killed during the transfer": killed_during,
    "replica killed after the commit": killed_after,
    "replica wedged during the transfer": wedged_during,
    "trainer dies in the middle": trainer_dies,
    "gateway killed in the middle": gateway_killed,
    "replica returns with old weights": returns_with_old_weights,
    "tensor damaged on its way to one replica": damaged_on_the_way,
    "tensor damaged in the store": damaged_in_the_store,
    DISK_FULL: disk_full,
    "replica killed in a rolling update": killed_while_rolling,
    "replica fails in a rolling update": fails_while_rolling,
    "trainer dies in a rolling update": trainer_dies_while_rolling,
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


async def until(condition: Callable[[], Awaitable[bool]], bound_s: float, what: str, retry_s: float = _RETRY_S) -> None:
    """Returns when the condition holds; `Hung` after the bound. A gateway that is away is asked again."""
    try:
        async with asyncio.timeout(bound_s):
            while True:
                try:
                    if await condition():
                        return
                except CallFailed:
                    pass
                await asyncio.sleep(retry_s)
    except TimeoutError as error:
        raise Hung(f"{what}: not within {bound_s:g} s") from error
