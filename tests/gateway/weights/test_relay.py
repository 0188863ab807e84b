"""Weights through the relay: a real receiver between a trainer over gloo and simulated replicas."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from engines.process.port import HeldPort
from engines.store.manifest import check_bytes
from engines.store.weight_store import RELAY, WeightStore
from engines.transfer.gloo import WeightGroup
from engines.types import Dialect
from gateway.weights import relay_process as relay
from gateway.weights.snapshots import Snapshots
from tests.rigs.forked_relay import ForkedRelay
from tests.rigs.rig import Json, Rig, SimReplica, StartRig
from trainer_client import BlockingRolloutClient, WeightSender

SHAPES: Json = {"w": [4, 4], "b": [4]}
TIMEOUT_S = 60.0
JOIN_S = 240.0
"""For the first of the relays that are processes, which loads torch."""


class Trainer:
    """A trainer as TRL's client is one: a thread in the group beside each call."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.group: WeightGroup | None = None
        self._port: HeldPort | None = None

    async def join(self, **changes: object) -> tuple[int, Json]:
        """Status and reply of the call; the group is left where it is no success."""
        self.leave()
        self._port = HeldPort()  # or the relay might draw it before the group listens
        port = self._port.number
        self.group = group = WeightGroup("127.0.0.1", port, 0, 2, JOIN_S)
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
        joining = asyncio.create_task(asyncio.to_thread(group.join))
        answer = await self.rig.post("/init_weight_transfer_engine", {"init_info": info | changes})
        if answer[0] != 200:
            self.leave()
        await asyncio.gather(joining, return_exceptions=answer[0] != 200)
        return answer

    @property
    def port(self) -> int:
        assert self._port is not None
        return self._port.number

    async def start(self) -> tuple[int, Json]:
        return await self.rig.post("/start_weight_update", {})

    async def send(self, named: dict[str, torch.Tensor]) -> tuple[int, Json]:
        """Announce and broadcast; returns when both are over."""
        assert self.group is not None
        sending = asyncio.create_task(asyncio.to_thread(self.group.send, iter(named.items())))
        answer = await self.announce(named)
        await sending
        return answer

    async def announce(self, named: dict[str, torch.Tensor]) -> tuple[int, Json]:
        info = {
            "names": list(named),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in named.values()],
            "shapes": [list(tensor.shape) for tensor in named.values()],
        }
        return await self.rig.post("/update_weights", {"update_info": info})

    async def finish(self) -> tuple[int, Json]:
        return await self.rig.post("/finish_weight_update", {})

    async def update(self) -> int:
        """One whole update that must succeed; its version."""
        for answer in (await self.start(), await self.send(tensors())):
            assert answer[0] == 200, answer
        status, reply = await self.finish()
        assert status == 200, reply
        return int(reply["weight_version"])

    def leave(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None
        if self._port is not None:
            self._port.release()


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def process() -> None:
    """The relay of this test is the process that it is in production."""


@pytest.fixture(autouse=True)
def fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "process" not in request.fixturenames:
        monkeypatch.setattr(relay, "LastingProcess", ForkedRelay)


@pytest.fixture
async def start(start_rig: StartRig, folder: Path, tmp_path: Path) -> Callable[..., object]:
    async def start(
        num_replicas: int = 2,
        tensors: Json = SHAPES,
        replicas: list[SimReplica] | None = None,
        **weights: object,
    ) -> Rig:
        engine = {"kind": "sim", "model": "sim", "num_replicas": num_replicas, "log_dir": str(tmp_path / "logs")}
        weights = {"store": str(folder), "relay": "always", **weights}
        sim = {"tensors": tensors}
        return await start_rig(num_replicas, sim=sim, replicas=replicas, weights=weights, engine=engine)

    return start


@pytest.fixture
async def trainer(start: StartRig) -> AsyncIterator[Trainer]:
    """One that is in a group with the relay."""
    trainer = Trainer(await start())
    assert (await trainer.join())[0] == 200
    yield trainer
    trainer.leave()


async def served(rig: Rig) -> set[int]:
    """The versions that all replicas answer with."""
    choices = (await rig.complete([[4, 5, 6]] * 8))["choices"]
    return {span["version"] for choice in choices for span in choice["weight_versions"]}


def kept(store: Path) -> set[str]:
    """But for what is being removed, which nobody waits for."""
    return {path.name for path in store.iterdir() if path.is_dir() and not path.name.startswith("draft-gone-")}


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def relay_pid(rig: Rig) -> int:
    return int((await rig.get("/status"))[1]["weight_relay"]["pid"])


@pytest.mark.usefixtures("process")
async def test_all_replicas_load_what_the_relay_received_and_it_ends_with_its_gateway(
    trainer: Trainer, folder: Path
) -> None:
    rig = trainer.rig
    assert await rig.get("/get_world_size") == (200, {"world_size": 1})
    assert await trainer.update() == 1
    assert await served(rig) == {1}
    assert await trainer.update() == 2
    (name,) = kept(folder)
    assert name.startswith("v2-")
    assert {name: tensor.shape for name, tensor in check_bytes(folder / name).tensors.items()} == SHAPES
    record = (await rig.get("/v1/weight_updates"))[1]["weight_updates"][0]
    assert (record["transport"], record["end"], record["tensors"], record["bytes"]) == ("relay", "committed", 2, 80)
    assert list(record["seconds"]) == ["transfer", "store", "prepare", "load", "canary", "label"]
    assert (await rig.get("/status"))[1]["weight_relay"]["in_group"]
    pid = await relay_pid(rig)
    assert runs(pid)
    await rig.stop_gateway()
    assert not runs(pid)


async def test_our_own_sender_takes_the_relay_for_what_it_is(start: StartRig) -> None:
    rig = await start()

    def push() -> list[int]:
        with BlockingRolloutClient(rig.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
            return [sender.push(tensors()), sender.push({"b": torch.zeros(4)})]

    assert await asyncio.to_thread(push) == [1, 2]
    assert await served(rig) == {2}


@pytest.mark.parametrize("is_started", [True, False])
async def test_a_trainer_that_is_refused_is_let_go_and_may_try_again(trainer: Trainer, is_started: bool) -> None:
    if is_started:
        await trainer.start()
    async with asyncio.timeout(TIMEOUT_S):
        status, reply = await trainer.send({"nonsense": torch.ones(3)})
    said = "has 'nonsense', which the served checkpoint does not have" if is_started else "/start_weight_update first"
    assert (status, said in reply["error"]["message"]) == (400 if is_started else 409, True), reply
    assert (await trainer.finish())[0] == 409
    assert await trainer.update() == 1


async def test_a_relay_whose_record_is_written_late_goes_on(start: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    note = Snapshots.note

    async def late(snapshots: Snapshots, name: str, record: Json) -> None:
        await asyncio.sleep(0.5 if name == RELAY else 0.0)
        await note(snapshots, name, record)

    monkeypatch.setattr(Snapshots, "note", late)
    trainer = Trainer(await start())
    assert (await trainer.join())[0] == 200
    assert await trainer.update() == 1
    trainer.leave()


async def test_a_store_without_room_is_named_before_anything_is_sent(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(WeightStore, "has_room_for", lambda *_: False)
        status, reply = await trainer.start()
    assert status == 409
    assert "has no room for 2 copies" in reply["error"]["message"]
    assert await served(trainer.rig) == {0}
    assert await trainer.update() == 1


@pytest.mark.parametrize("moment", ["between updates", "in an update"])
async def test_a_trainer_goes_on_with_the_relay_of_a_gateway_that_was_killed_between_updates(
    trainer: Trainer, start: StartRig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    assert await trainer.update() == 1
    if moment == "in an update":
        assert (await trainer.start())[0] == 200
        assert (await trainer.send(tensors()))[0] == 200
    await kill_gateway(trainer.rig, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(relay, "LastingProcess", ForkedRelay)
    trainer.rig = await start(replicas=trainer.rig.replicas)
    if moment == "in an update":
        assert not (await trainer.rig.get("/status"))[1]["weight_relay"]["in_group"]
        assert (await trainer.finish())[0] == 409
        assert (await trainer.join())[0] == 200
    assert await trainer.update() == 2
    assert await served(trainer.rig) == {2}


@pytest.mark.parametrize("moment", ["between updates", "in an update", "after a refusal"])
async def test_a_flat_group_lives_through_a_gateway_that_is_killed_between_updates(
    start: StartRig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    rig = await start(relay="never")
    await rig.open_group()
    await rig.update()
    if moment == "in an update":
        assert (await rig.post("/start_weight_update", {}))[0] == 200
        assert (await rig.post("/update_weights", {"update_info": rig.tensors}))[0] == 200
    if moment == "after a refusal":
        assert (await rig.post("/start_weight_update", {}))[0] == 200
        unknown = rig.tensors | {"names": ["unknown", *rig.tensors["names"][1:]]}
        assert (await rig.post("/update_weights", {"update_info": unknown}))[0] == 400
    await kill_gateway(rig, monkeypatch)
    rig = await start(replicas=rig.replicas, relay="never")
    status, reply = await rig.post("/start_weight_update", {"group": "127.0.0.1:1"})
    if moment == "between updates":
        assert status == 200
        assert (await rig.post("/update_weights", {"update_info": rig.tensors}))[0] == 200
        assert (await rig.post("/finish_weight_update", {}))[1]["weight_version"] == 2
    else:
        assert (status, "as after a restart of the gateway" in reply["error"]["message"]) == (424, True)


async def kill_gateway(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a gateway that cleans nothing up: neither its relay nor its drafts."""

    async def die(dead: relay.Relay) -> None:
        """What the kernel does for a process that has died: it closes its sockets."""
        if dead._client is not None:
            await dead._client.close()
        if dead._port is not None:
            dead._port.release()

    monkeypatch.setattr(relay.Relay, "close", die)
    monkeypatch.setattr(WeightStore, "discard", lambda store, draft: os.close(store._owned.pop(draft)))
    await rig.stop_gateway()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is such a GPU")
async def test_a_relay_whose_gpu_is_not_there_says_so_at_once(start: StartRig) -> None:
    status, reply = await Trainer(await start(relay_device="cuda:0")).join()
    assert status == 424
    assert (
        "it ended with 1 before it was ready: torch sees no GPU: set weights.relay_device" in reply["error"]["message"]
    )


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"world_size": 3}, 409, "the relay receives for all replicas, so the group needs 2"),
        ({"packed": False}, 400, "set packed to true"),
        ({"master_port": None}, 400, "init_info.master_port is missing"),
    ],
)
async def test_a_group_that_cannot_be_is_refused_with_the_remedy(
    start: StartRig, change: Json, status: int, said: str
) -> None:
    trainer = Trainer(await start())
    answered, reply = await trainer.join(**change)
    assert answered == status
    assert said in reply["error"]["message"]
    assert (await trainer.join())[0] == 200
    assert await trainer.update() == 1
    trainer.leave()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


async def test_a_disk_that_fills_up_in_the_transfer_is_named_with_the_remedy(
    start: StartRig, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = {"w": torch.ones(200, 200)}
    trainer = Trainer(await start(store=str(small_disk / "store"), tensors={"w": [200, 200]}))
    await trainer.join()
    monkeypatch.setattr(WeightStore, "has_room_for", lambda *_: True)
    await trainer.start()
    assert (await trainer.send(big))[0] == 200
    status, reply = await trainer.finish()
    assert status == 409
    assert "the disk of the weight store is full: make room" in reply["error"]["message"]
    assert await served(trainer.rig) == {0}
    assert kept(small_disk / "store") == set()
    trainer.leave()


@pytest.mark.parametrize(
    ("weights", "dialect", "num_replicas", "world_size"),
    [
        ({}, Dialect.VLLM, 2, 1),
        ({}, Dialect.VLLM, 1, 1),
        ({"relay": "never"}, Dialect.VLLM, 2, 2),
        ({"store": None}, Dialect.VLLM, 2, 2),
        ({"relay_device": "cuda:0"}, Dialect.VLLM, 2, 2),  # these engines receive over gloo
        ({}, Dialect.SGLANG, 2, 1),
        ({}, Dialect.SGLANG, 1, 1),
    ],
)
async def test_auto_is_the_relay_where_it_can_receive_for_more_than_one_replica(
    start: StartRig,
    weights: Json,
    dialect: Dialect,
    num_replicas: int,
    world_size: int,
) -> None:
    rig = await start(num_replicas, **{"relay": "auto"} | weights)
    for replica in rig.fleet.replicas:
        replica.info = replace(replica.info, dialect=dialect, transport="gloo")
    assert await rig.get("/get_world_size") == (200, {"world_size": world_size})
    told = (await rig.get("/server_info?config_format=json"))[1]["vllm_config"]["weight_transfer_config"]
    assert told == {"backend": "gloo" if (num_replicas, world_size) == (2, 1) else "sim"}
