"""Faults for a fleet, each injected at a certain moment of a weight update.

A fault gets the running application and returns when it is injected; the caller watches the recovery.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft, raw

Json = dict[str, Any]

DISK_FULL = "disk full in the weight store"

_RETRY_S = 0.2
_FILLINGS = 5
_UNAIDED_S = 90.0
_TENSORS = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 4]]}


class CallFailed(Exception):
    """A weight call with an error answer, or none."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__(f"{path}: {status} {text[:300]}")
        self.status = status


class Hung(Exception):
    """A call without an answer within the bound."""


@dataclass(slots=True)
class Newest:
    """The newest version that a trainer has committed."""

    version: int = 0


class Trainer:
    """The bounded calls of one trainer session. Tensors are announced to the simulated engines, but not sent."""

    def __init__(self, url: str, newest: Newest, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._newest = newest
        self._session = session

    async def join(self) -> None:
        """Open a transfer group over the current fleet."""
        size = (await self.call("GET", "/get_world_size"))["world_size"]
        info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": size + 1}
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": info})

    async def start(self) -> None:
        await self.call("POST", "/start_weight_update")

    async def send(self, **otherwise: Any) -> None:
        """Announce the tensors; `otherwise` overrides fields with wrong values."""
        await self.call("POST", "/update_weights", {"update_info": {**_TENSORS, **otherwise}})

    async def finish(self) -> None:
        reply = await self.call("POST", "/finish_weight_update")
        self._newest.version = max(self._newest.version, reply["weight_version"])

    async def update(self) -> None:
        await self.start()
        await self.send()
        await self.finish()

    async def push(self, *, damaged: bool = False) -> None:
        """Push a version through the store; `damaged` changes a byte after the digests are made."""
        store = await self.call("GET", "/v1/weight_store")
        draft, owner = claim_draft(Path(store["folder"]))
        try:
            written = Draft(draft, store["model"])
            written.add([raw("weight", "float32", [4, 4], bytes(64))])
            written.finish()
            if damaged:
                _change_last_byte(next(draft.glob("*.safetensors")))
            body = {"transport": "store", "snapshot": draft.name}
            reply = await self.call("POST", "/v1/weight_updates", body)
            self._newest.version = max(self._newest.version, reply["weight_version"])
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            os.close(owner)

    async def tell_engine(self, replica: Json, method: str, **arguments: Any) -> None:
        """Make the simulated engine of one replica misbehave, or stop misbehaving."""
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
        """Return True if every replica serves."""
        return [replica["state"] for replica in await self.replicas()] == ["SERVING"] * self.size

    async def replicas(self) -> list[Json]:
        """Return the replicas in /status, serving ones first."""
        found: list[Json] = (await self.trainer.call("GET", "/status"))["replicas"]
        return sorted(found, key=lambda replica: replica["state"] != "SERVING")

    async def updated(self) -> bool:
        """Push a version from a new trainer session to a complete fleet."""
        if len(await self.replicas()) < self.size:
            return False
        await self.trainer.join()
        await self.trainer.update()
        return await self.serves()

    async def engine_pid(self) -> int:
        """Return the engine server of one replica, a serving one if possible."""
        return int((await self.replicas())[0]["pid"])

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
    """Kill a replica after the commit: its successor must load the current version without the trainer."""
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
    """Kill the trainer during its update: the fleet must end the update and roll back."""
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
    """Let one replica receive other bytes than its peers."""
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
    """Fill the store's disk: a group update goes on without a copy; a store update fails and leaves no files."""
    folder = Path((await world.trainer.call("GET", "/v1/weight_store"))["folder"])
    with _filled(folder) as fill:
        await world.trainer.update()
        for _ in range(_FILLINGS):  # a version that the update made superfluous may go, and leaves room
            fill()
            if await _finds_no_room(world.trainer):
                return
    raise AssertionError(f"{_FILLINGS} pushes found room on a full disk")


async def _finds_no_room(trainer: Trainer) -> bool:
    """Return False if the push succeeded; raise any other failure than the expected one."""
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
    """Freeze a replica while the others take a version: it must take it before it serves."""
    silent = (await world.replicas())[0]
    os.kill(silent["pid"], signal.SIGSTOP)
    try:
        await until(lambda: _is_out(world, silent), _UNAIDED_S, "the silent replica to be left out")
        await world.trainer.push()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was replaced meanwhile
            os.kill(silent["pid"], signal.SIGCONT)
    await until(world.serves, _UNAIDED_S, "the one that was silent to serve")


async def fails_while_loading(world: World) -> None:
    """Have one replica load other weights than its label says: all go back to the version before."""
    replica = (await world.replicas())[-1]
    await world.trainer.tell_engine(replica, "corrupt_loads", on=True)
    with refused(424):
        await world.trainer.push()
    await world.trainer.tell_engine(replica, "corrupt_loads", on=False)
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
    """Return True if updates leave this replica out."""
    return replica["replica_id"] not in {found["replica_id"] for found in await world.replicas()}


@contextmanager
def _filled(folder: Path) -> Iterator[Callable[[], None]]:
    """Fill the folder's file system; yield a function that fills it again."""
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
    "replica loads other weights": fails_while_loading,
    "tensors of wrong shapes": wrong_shapes,
    "two trainers at once": two_trainers,
    "a new trainer session in the middle": new_session,
}


@contextmanager
def refused(status: int | None = None) -> Iterator[None]:
    """Allow an error answer inside the block; with `status` require it."""
    try:
        yield
    except CallFailed as error:
        if status is not None and error.status != status:
            raise
    else:
        if status is not None:
            raise CallFailed("this call", 200, f"was to be refused with {status}")


async def until(condition: Callable[[], Awaitable[bool]], bound_s: float, what: str, retry_s: float = _RETRY_S) -> None:
    """Return when the condition holds; raise `Hung` after the bound. An unreachable gateway is retried."""
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
