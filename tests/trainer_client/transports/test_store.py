"""A trainer that sends versions through the weight store to simulated replicas."""

import asyncio
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import (
    ConfigError,
    StoreFailed,
)
from engines.store.draft import Draft, claim_draft, raw
from engines.store.manifest import check_bytes
from tests.material.drafts import kept
from tests.rigs.rig import STORED, Rig, StartRig
from trainer_client import BlockingRolloutClient, WeightSender


@pytest.fixture
def rig(store_rig: Rig) -> Rig:
    return store_rig


def tensors(**changes: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list({**{name: torch.zeros(shape) for name, shape in STORED.items()}, **changes}.items())


async def push(
    rig: Rig, named: Iterable[tuple[str, torch.Tensor]], version: int | None = None, in_flight: Any = None
) -> int:
    return await asyncio.to_thread(send, rig.url, named, version, in_flight=in_flight)


def send(
    url: str,
    named: Iterable[tuple[str, torch.Tensor]],
    version: int | None = None,
    folder: Path | None = None,
    in_flight: Any = None,
) -> int:
    with (
        BlockingRolloutClient(url, attempts=1) as client,
        WeightSender(client, transport="store", folder=folder, timeout_s=10) as sender,
    ):
        return sender.push(named, version, in_flight=in_flight)


def folders(store: Path) -> set[str]:
    """But for what is being removed, which nobody waits for."""
    return {path.name for path in store.iterdir() if path.is_dir() and not path.name.startswith("draft-gone-")}


async def said(rig: Rig) -> tuple[set[int], set[tuple[int, ...]]]:
    """Versions and tokens of what the fleet answers to one prompt, asked so often that every replica is."""
    choices = (await rig.complete([[4, 5, 6]] * 8, temperature=0))["choices"]
    versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
    return versions, {tuple(choice["token_ids"]) for choice in choices}


async def announce(rig: Rig, **body: Any) -> tuple[int, Any]:
    return await rig.post("/v1/weight_updates", {"transport": "store", **body})


async def test_a_pushed_version_is_served_by_all_and_kept(rig: Rig, folder: Path) -> None:
    _, before = await said(rig)
    assert await push(rig, tensors()) == 1
    versions, after = await said(rig)
    assert versions == {1}
    assert len(after) == 1
    assert before != after
    assert check_bytes(kept(folder, 1)).tensors.keys() == STORED.keys()
    assert folders(folder) == {kept(folder, 1).name}
    _, updates = await rig.get("/v1/weight_updates")
    (record,) = updates["weight_updates"]
    assert (record["transport"], record["end"], record["tensors"], record["bytes"]) == ("store", "committed", 2, 80)


async def test_a_push_says_what_becomes_of_rollouts_in_flight(rig: Rig) -> None:
    await push(rig, tensors(), in_flight="drain")
    await push(rig, tensors())
    with pytest.raises(ConfigError, match="in_flight = 'end' must be one of keep, recompute, drain"):
        await push(rig, tensors(), in_flight="end")
    _, updates = await rig.get("/v1/weight_updates")
    assert [record["in_flight"] for record in updates["weight_updates"]] == ["keep", "drain"]


async def test_what_is_left_out_stays_as_it_is(rig: Rig, folder: Path) -> None:
    await push(rig, tensors())
    before = check_bytes(kept(folder, 1)).tensors
    assert await push(rig, [("b", torch.ones(4))]) == 2
    after = check_bytes(kept(folder, 2)).tensors
    assert [name for name in STORED if before[name].digest != after[name].digest] == ["b"]


@pytest.mark.parametrize("copies", [2.5, 3.3], ids=["two copies", "three with the draft of a dead trainer"])
async def test_versions_go_on_coming_where_two_fit(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch, copies: float
) -> None:
    size = 4 << 18
    limit, usage = int(copies * size), shutil.disk_usage

    def used() -> int:
        return sum({file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.safetensors")}.values())

    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=max(0, limit - used())))
    rig = await start_rig(2, sim={"tensors": {"w": [512, 512]}}, weights={"store": str(folder)})
    for version in range(1, 6):
        if copies > 3 and version == 4:
            draft, owner = claim_draft(folder)
            Draft(draft, "sim").add([raw("w", "float32", [512, 512], bytes(size))])
            os.close(owner)
        assert await push(rig, [("w", torch.zeros(512, 512))]) == version


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"snapshot": "../elsewhere"}, "snapshot"),
        ({}, "snapshot"),
        ({"snapshot": "draft-x", "version": "next"}, "version"),
        ({"snapshot": "draft-x", "transport": "nccl"}, "transport"),
    ],
)
async def test_an_announcement_that_makes_no_sense_is_refused(rig: Rig, body: dict[str, Any], param: str) -> None:
    status, reply = await announce(rig, **body)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_without_a_store_the_remedy_is_named(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim={"tensors": STORED})
    with pytest.raises(StoreFailed, match=r"there is no weight store: weights\.store is null"):
        await push(rig, tensors())


async def test_a_store_that_is_not_shared_is_named(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match=r"share weights\.store"):
        await asyncio.to_thread(send, rig.url, tensors(), folder=tmp_path / "not-there")
