"""Versions that survive: what replicas serve after deaths, damage, full disks and restarts, with a weight store."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.engine import ReceiptCopy
from engines.errors import EngineFailed
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore, remove_folder
from engines.types import ReplicaInfo
from engines.weight_label import version_of
from gateway.fleet.replica import Replica
from gateway.weights import catch_up
from gateway.weights.canary import Canary
from gateway.weights.verdicts import Finding, Result
from tests.rigs.rig import Json, Rig, SimReplica, StartRig

BOTH_SERVE = {"engine-0": "SERVING", "engine-1": "SERVING"}
TENSORS = {"tensors": {"w": [4, 4], "b": [4]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(start_rig: StartRig, folder: Path) -> Callable[..., object]:
    """Starts rigs of two replicas that keep their versions in one folder."""

    async def start(replicas: list[SimReplica] | None = None, **weights: object) -> Rig:
        return await start_rig(2, sim=TENSORS, replicas=replicas, weights={"store": str(folder), **weights})

    return start


@pytest.fixture
async def kept(start: StartRig) -> Rig:
    """A rig whose fleet is at version 1, which the store keeps."""
    rig = await start()
    await rig.open_group()
    await rig.update()
    await until_kept(rig, [1])
    async with asyncio.timeout(20):  # a version that is kept makes failed catch-ups try again
        while any(task.get_name() == "keep version 1" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
    return rig


async def until_kept(rig: Rig, versions: list[int]) -> None:
    async with asyncio.timeout(20):
        while (await rig.get("/status"))[1]["weight_store"]["versions"] != versions:
            await asyncio.sleep(0.02)


def folders(store: Path) -> set[str]:
    return {path.name for path in store.iterdir() if path.is_dir()}


async def greedy(rig: Rig) -> set[tuple[int, ...]]:
    """The fleet's answer to one prompt, asked so often that every replica answers."""
    reply = await rig.complete([[4, 5, 6]] * 8, temperature=0)
    return {tuple(choice["token_ids"]) for choice in reply["choices"]}


async def served_versions(rig: Rig) -> set[int]:
    reply = await rig.complete([[4, 5, 6]] * 8)
    return {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}


async def begun(rig: Rig) -> None:
    await rig.open_group()
    assert (await rig.post("/start_weight_update", {}))[0] == 200


async def test_a_version_is_kept_as_a_checkpoint_folder(kept: Rig, folder: Path) -> None:
    manifest = check_bytes(folder / "v1")
    assert (manifest.version, manifest.model) == (1, "sim")
    assert {name: tensor.shape for name, tensor in manifest.tensors.items()} == TENSORS["tensors"]
    assert (await kept.get("/status"))[1]["weight_store"] == {"folder": str(folder), "versions": [1], "reason": ""}


async def test_a_replica_on_another_node_writes_no_version_down(
    start: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, writers = await start(), []
    first, second = rig.fleet.replicas
    first.info = replace(first.info, key="its forwarder's")
    opened = VllmEngine.open_receipt

    async def open_receipt(self: VllmEngine, copy: ReceiptCopy | None, timeout_s: float) -> None:
        writers.extend([self.replica_id] if copy else [])
        await opened(self, copy, timeout_s)

    monkeypatch.setattr(VllmEngine, "open_receipt", open_receipt)
    await rig.open_group()
    await rig.update()
    assert writers == [second.replica_id]


async def test_a_replica_that_comes_back_serves_the_current_version_without_an_update(kept: Rig) -> None:
    said = await greedy(kept)
    await kept.replicas[0].kill()
    await kept.add_replica("engine-0")
    await kept.until(BOTH_SERVE)
    assert await greedy(kept) == said
    assert await served_versions(kept) == {1}


async def test_a_replica_killed_in_the_transfer_leaves_the_fleet_at_the_version_before(kept: Rig) -> None:
    said = await greedy(kept)
    await begun(kept)
    await kept.replicas[0].kill()
    status, reply = await kept.post("/update_weights", {"update_info": kept.tensors})
    assert status == 424
    assert "engine-0" in reply["error"]["message"]
    async with asyncio.timeout(30):
        while (await kept.states())["engine-1"] != "SERVING":
            await asyncio.sleep(0.02)
    assert await greedy(kept) == said
    await kept.add_replica("engine-0")
    await kept.until(BOTH_SERVE)
    assert await greedy(kept) == said
    await kept.open_group()
    await kept.update()
    assert await served_versions(kept) == {2}


async def test_replicas_leave_the_group_of_a_transfer_that_failed(kept: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to close a group under an open update, however late the call arrives that ends it."""
    closed: list[str] = []
    close, end = VllmEngine.close_weight_group, VllmEngine.abandon_weight_update

    async def noted(self: VllmEngine, timeout_s: float) -> None:
        await close(self, timeout_s)
        closed.append(self.replica_id)

    async def late(self: VllmEngine, timeout_s: float, *, drops_receipt: bool = False) -> None:
        await asyncio.sleep(0.05)
        await end(self, timeout_s, drops_receipt=drops_receipt)

    async def broken(self: VllmEngine, *_: object) -> None:
        raise EngineFailed("a byte is wrong", replica_id=self.replica_id)

    await begun(kept)
    monkeypatch.setattr(VllmEngine, "close_weight_group", noted)
    monkeypatch.setattr(VllmEngine, "abandon_weight_update", late)
    monkeypatch.setattr(VllmEngine, "update_weights", broken)
    assert (await kept.post("/update_weights", {"update_info": kept.tensors}))[0] == 424
    await kept.until(BOTH_SERVE)
    assert sorted(closed) == ["engine-0", "engine-1"]


async def test_a_tensor_damaged_on_its_way_is_named_with_its_replica_and_nobody_serves_it(start_rig: StartRig) -> None:
    rig = await start_rig(3, sim=TENSORS)
    said = await greedy(rig)
    await begun(rig)
    rig.replicas[1].damage("b")
    await rig.post("/update_weights", {"update_info": rig.tensors})
    status, reply = await rig.post("/finish_weight_update", {})
    assert status == 424
    assert "tensor 'b' arrived with different bytes: replica engine-1 (xxh3_128:" in reply["error"]["message"]
    await rig.until(dict.fromkeys(("engine-0", "engine-1", "engine-2"), "SERVING"))
    assert await greedy(rig) == said
    assert await served_versions(rig) == {0}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The store's disk, whose free bytes can be set."""
    usage = SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage


async def test_a_store_without_room_is_said_once_in_status_and_the_fleet_goes_on(
    start: StartRig, folder: Path, disk: SimpleNamespace
) -> None:
    rig = await start()
    disk.free = 10
    await rig.open_group()
    await rig.update()
    assert await served_versions(rig) == {1}
    store = (await rig.get("/status"))[1]["weight_store"]
    assert store["versions"] == []
    assert "has no room for 2 copies" in store["reason"]
    assert "weights.store" in store["reason"]


async def test_a_replica_that_comes_back_without_a_kept_version_says_what_it_waits_for(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.replicas[0].kill()
    await rig.add_replica("engine-0")
    await rig.until({"engine-0": "SYNCING", "engine-1": "SERVING"})
    await asyncio.sleep(0.1)
    (replica, _) = (await rig.get("/status"))[1]["replicas"]
    assert "waits for the next update" in replica["reason"]
    assert "weights.store is null" in replica["reason"]
    await rig.open_group()
    await rig.update()
    await rig.until(BOTH_SERVE)


@pytest.mark.parametrize("first_found", [[], ["engine-1"]])
async def test_a_trainer_that_asks_before_all_replicas_are_found_costs_no_version(
    kept: Rig, start: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch, first_found: list[str]
) -> None:
    """A gateway and a replica that start anew do not know yet that another holds version 1."""
    await kept.stop_gateway()
    await kept.replicas[1].kill()
    await kept.add_replica("engine-1", seed=1)
    discover, listen, looks = Rig._discover, Rig.listen, iter([first_found])

    async def found(self: Rig) -> list[ReplicaInfo]:
        there = await discover(self)
        names = next(looks, None)
        return there if names is None else [info for info in there if info.replica_id in names]

    async def asked(self: Rig) -> Rig:
        await listen(self)
        assert (await self.get("/v1/weight_store"))[0] == 200
        return self

    monkeypatch.setattr(Rig, "_discover", found)
    monkeypatch.setattr(Rig, "listen", asked)
    again = await start(kept.replicas)
    await again.until(BOTH_SERVE)
    assert await served_versions(again) == {1}
    assert "v1" in folders(folder)


async def test_a_store_that_fails_after_the_commit_does_not_fail_the_update(
    kept: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(WeightStore, "prune", stale)
    await kept.open_group()
    await kept.update()
    assert await served_versions(kept) == {2}


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[threading.Event]:
    """Nothing is removed from the store before it is set."""

    def remove(folder: Path) -> None:
        assert event.wait(20)
        remove_folder(folder)

    event = threading.Event()
    monkeypatch.setattr("gateway.weights.snapshots.remove_folder", remove)
    yield event
    event.set()


async def refused(rig: Rig) -> int:
    """The status of an update that the canary takes for another one than the trainer's."""
    told = [-1.0] * 63
    for logprobs in (told, [-9.0] * 63):
        await rig.post("/start_weight_update", {})
        await rig.post("/update_weights", {"update_info": rig.tensors})
        status, _ = await rig.post("/finish_weight_update", {"canary_logprobs": logprobs})
    return status


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The loads and wipes of replicas, in their order."""
    found: list[str] = []
    load_snapshot, finish_weight_update = VllmEngine.load_snapshot, VllmEngine.finish_weight_update

    async def load(engine: VllmEngine, path: str, version: int, timeout_s: float) -> None:
        await load_snapshot(engine, path, version, timeout_s)
        found.append(f"load {version}")

    async def finish(engine: VllmEngine, label: str, timeout_s: float) -> None:
        await finish_weight_update(engine, label, timeout_s)
        found.append(f"finish {version_of(label)}")

    async def wipe_kv(engine: VllmEngine, timeout_s: float) -> None:
        found.append("wipe")

    monkeypatch.setattr(VllmEngine, "load_snapshot", load)
    monkeypatch.setattr(VllmEngine, "finish_weight_update", finish)
    monkeypatch.setattr(VllmEngine, "wipe_kv", wipe_kv)
    return found


async def test_the_next_version_is_written_once_the_refused_one_has_made_room(kept: Rig, held: threading.Event) -> None:
    assert await refused(kept) == 424
    await kept.until(BOTH_SERVE)
    await kept.post("/start_weight_update", {})
    asked = asyncio.create_task(kept.post("/update_weights", {"update_info": kept.tensors}))
    assert not (await asyncio.wait([asked], timeout=0.2))[0]
    held.set()
    assert (await asked)[0] == 200


@pytest.mark.parametrize("loads_between_steps", [True, False])
async def test_a_load_waits_for_requests_that_an_engine_still_ends_only_where_it_would_meet_them(
    start_rig: StartRig, folder: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch, loads_between_steps: bool
) -> None:
    async def reset(*_: object) -> bool:
        loads.append("reset")
        return not loads_between_steps or "load 1" in loads

    monkeypatch.setattr(ReplicaInfo, "loads_between_steps", loads_between_steps)
    monkeypatch.setattr(VllmEngine, "reset_prefix_cache", reset)
    rig = await start_rig(1, sim=TENSORS, weights={"store": str(folder)})
    await rig.open_group()
    assert await refused(rig) == 424
    await rig.until({"engine-0": "SERVING"})
    first = [] if loads_between_steps else ["reset"]
    assert loads == ["finish 1", "finish 2", *first, "load 1", "reset", "wipe"]


async def test_refused_updates_are_no_failures_of_the_rollouts_or_the_replicas_under_them(
    start_rig: StartRig, folder: Path
) -> None:
    rig = await start_rig(2, sim={**TENSORS, "decode_step_s": 0.02}, weights={"store": str(folder)})
    await rig.open_group()
    await rig.update()
    rollouts = [asyncio.create_task(rig.complete([[index]], max_tokens=120, ignore_eos=True)) for index in range(6)]
    for _ in range(4):  # one more than gateway.max_attempts
        await until_placed(rig, rollouts)
        assert await refused(rig) == 424
        await rig.until(BOTH_SERVE)
    assert not any(replica.backoff.until for replica in rig.fleet.replicas)
    for reply in await asyncio.gather(*rollouts):
        (choice,) = reply["choices"]
        assert len(choice["token_ids"]) == 120


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_answers_with_refused_weights_is_no_refusal_of_the_rollout(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, stream: bool
) -> None:
    rig = await start_rig(1, sim=TENSORS, weights={"store": str(folder)}, gateway={"max_attempts": 1})
    await rig.open_group()
    await rig.update()
    rig.replicas[0].inject(held="/v1/completions")
    asked = asyncio.create_task(streamed_or_whole(rig, stream=stream))
    await until_held(rig.replicas[0])

    async def check(_: Canary, replicas: Sequence[Replica], *__: object, **___: object) -> dict[Replica, Finding]:
        rig.replicas[0].inject(status=status)  # as vLLM does where a log-prob is NaN
        await asyncio.sleep(0.2)
        assert not asked.done()
        rig.replicas[0].inject()
        return dict.fromkeys(replicas, Finding(Result.FAILED, "NaN"))

    monkeypatch.setattr(Canary, "check", check)
    for path, body in (
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": rig.tensors}),
        ("/finish_weight_update", {}),
    ):
        code, _ = await rig.post(path, body)
    assert code == 424
    assert await asked == 200
    assert not rig.fleet.replicas[0].backoff.until


async def test_engines_that_weights_kill_before_the_verdict_die_of_no_prompt(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(2, sim=TENSORS, gateway={"max_attempts": 1})
    await rig.open_group()
    await rig.update()
    asked = asyncio.create_task(rig.complete([[1], [2]], max_tokens=60, ignore_eos=True))
    await rig.begun(2)

    async def check(_: Canary, replicas: Sequence[Replica], *__: object, **___: object) -> dict[Replica, Finding]:
        await asyncio.gather(*(replica.kill() for replica in rig.replicas))  # as SGLang does where a log-prob is NaN
        return dict.fromkeys(replicas, Finding(Result.LOST, "it died"))

    monkeypatch.setattr(Canary, "check", check)
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    status, _ = await rig.post("/finish_weight_update", {})
    assert status == 424
    monkeypatch.undo()
    started = {(await rig.add_replica(f"engine-{index}")).info.incarnation for index in range(2)}
    async with asyncio.timeout(20):
        while {replica.info.incarnation for replica in rig.fleet.replicas} != started:
            await asyncio.sleep(0.01)
    await rig.open_group()
    await rig.update()
    assert [len(choice["token_ids"]) for choice in (await asked)["choices"]] == [60, 60]


async def streamed_or_whole(rig: Rig, *, stream: bool) -> int:
    """The status of a rollout's reply; that of the error in it where it has one."""
    body = {"prompt": [5], "max_tokens": 4, "stream": stream}
    async with rig.client.post(f"{rig.url}/v1/completions", json=body) as response:
        return 500 if b'"error"' in await response.read() else response.status


async def until_held(replica: SimReplica) -> None:
    async with asyncio.timeout(20):
        while not replica.num_held:
            await asyncio.sleep(0.01)


async def until_placed(rig: Rig, rollouts: Sequence["asyncio.Task[Json]"]) -> None:
    """Wait until replicas have the rollouts that have not ended."""
    async with asyncio.timeout(20):
        while sum(replica.load_samples for replica in rig.fleet.replicas) < sum(not one.done() for one in rollouts):
            await asyncio.sleep(0.01)


async def test_a_replica_that_fails_the_canary_is_mended_from_the_store(start_rig: StartRig, folder: Path) -> None:
    weights: Json = {"store": str(folder), "must_pass": "quorum"}
    rig = await start_rig(3, sim=TENSORS, odd={"engine-1": {"corrupt_after": 1}}, weights=weights)
    await rig.open_group()
    await rig.update()
    await until_kept(rig, [1])
    await rig.update()
    await rig.until(dict.fromkeys(("engine-0", "engine-1", "engine-2"), "SERVING"))
    assert len(await greedy(rig)) == 1
    assert await served_versions(rig) == {2}


async def test_a_replica_that_a_store_out_of_reach_kept_back_is_tried_again(
    kept: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_AGAIN_S", 0.2)
    away = folder.with_name("away")
    shutil.move(folder, away)
    await kept.replicas[1].kill()
    await kept.until({"engine-0": "SERVING"})
    await kept.add_replica("engine-1", seed=1)
    async with asyncio.timeout(20):
        while "not brought back" not in kept.fleet.replicas[-1].reason:
            await asyncio.sleep(0.02)
    shutil.move(away, folder)
    await kept.until(BOTH_SERVE)
    assert {replica.weight_version for replica in kept.fleet.replicas} == {1}
