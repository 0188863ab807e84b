"""Versions that survive: what replicas serve after deaths, damage, full disks and restarts, with a weight store."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.engine import ReceiptCopy
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore
from gateway.fleet.replica import Replica
from gateway.weights import catch_up
from gateway.weights.canary import Canary
from gateway.weights.verdicts import Finding, Result
from tests.material import drafts
from tests.rigs.calls import until
from tests.rigs.rig import Rig, SimReplica, StartRig

BOTH_SERVE = {"engine-0": "SERVING", "engine-1": "SERVING"}
TENSORS = {"tensors": {"w": [4, 4], "b": [4]}}


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
    # A version that is kept makes failed catch-ups try again.
    await until(lambda: all(task.get_name() != "keep version 1" for task in asyncio.all_tasks()))
    return rig


async def until_kept(rig: Rig, versions: list[int]) -> None:
    await until(lambda: rig.get("/status"), lambda got: got[1]["weight_store"]["versions"] == versions)


async def served_versions(rig: Rig) -> set[int]:
    reply = await rig.complete([[4, 5, 6]] * 8)
    return {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}


async def test_a_version_is_kept_as_a_checkpoint_folder(kept: Rig, folder: Path) -> None:
    manifest = check_bytes(drafts.kept(folder, 1))
    assert manifest.model == "sim"
    assert {name: tensor.shape for name, tensor in manifest.tensors.items()} == TENSORS["tensors"]
    assert (await kept.get("/status"))[1]["weight_store"] == {"folder": str(folder), "versions": [1], "reason": ""}


async def test_a_replica_on_another_node_writes_no_version_down(
    start: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, writers = await start(), []
    first, second = rig.fleet.replicas
    first.info = replace(first.info, is_far=True)
    opened = VllmEngine.open_receipt

    async def open_receipt(self: VllmEngine, copy: ReceiptCopy | None, timeout_s: float) -> None:
        writers.extend([self.replica_id] if copy else [])
        await opened(self, copy, timeout_s)

    monkeypatch.setattr(VllmEngine, "open_receipt", open_receipt)
    await rig.open_group()
    await rig.update()
    assert writers == [second.replica_id]


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


async def test_a_store_that_fails_after_the_commit_does_not_fail_the_update(
    kept: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(WeightStore, "prune", stale)
    await kept.open_group()
    await kept.update()
    assert await served_versions(kept) == {2}


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


async def streamed_or_whole(rig: Rig, *, stream: bool) -> int:
    """The status of a rollout's reply; that of the error in it where it has one."""
    body = {"prompt": [5], "max_tokens": 4, "stream": stream}
    async with rig.client.post(f"{rig.url}/v1/completions", json=body) as response:
        return 500 if b'"error"' in await response.read() else response.status


async def until_held(replica: SimReplica) -> None:
    await until(lambda: replica.num_held)


async def test_a_replica_that_a_store_out_of_reach_kept_back_is_tried_again(
    kept: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "_AGAIN_S", 0.2)
    away = folder.with_name("away")
    shutil.move(folder, away)
    await kept.replicas[1].kill()
    await kept.until({"engine-0": "SERVING"})
    await kept.add_replica("engine-1", seed=1)
    await until(lambda: "not brought back" in kept.fleet.replicas[-1].reason)
    shutil.move(away, folder)
    await kept.until(BOTH_SERVE)
    assert {replica.weight_version for replica in kept.fleet.replicas} == {1}
