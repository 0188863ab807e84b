"""The store of a gateway, where its folder leaves while it serves."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft, raw
from engines.store.weight_store import WeightStore
from gateway.config.schema import WeightsConfig
from gateway.weights.snapshots import Snapshots

MADE = "1-0000000a"


async def test_a_folder_that_is_gone_is_made_again_for_the_next_version(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    snapshots = Snapshots(WeightsConfig(store=str(folder)), "app", lambda: None)
    await snapshots.open()
    try:
        shutil.rmtree(folder)
        draft = await snapshots.draft(0, 1)
        assert draft is not None
        assert draft.is_dir()
        shutil.rmtree(folder)
        assert await snapshots.why_not(1) == ""
        assert folder.is_dir()
    finally:
        await snapshots.close()


async def test_a_promotion_that_the_store_ends_late_makes_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update was aborted meanwhile, and its number may be used again."""
    promote, may_begin, ended = WeightStore.promote, threading.Event(), threading.Event()

    def promote_late(*arguments: Any) -> None:
        may_begin.wait(20)
        try:
            promote(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(WeightStore, "promote", promote_late)
    snapshots = Snapshots(WeightsConfig(store=str(tmp_path), load_timeout_s=2.0), "app", lambda: None)
    await snapshots.open()
    with pytest.raises(StoreFailed, match="did not answer"):
        await snapshots.promote(tmp_path / written(tmp_path), MADE, 0, [])
    await snapshots.withdraw(1)
    may_begin.set()
    assert await asyncio.to_thread(ended.wait, 20)
    await snapshots.removed()
    assert snapshots.versions == []
    assert folders(tmp_path) == []
    await snapshots.close()


async def test_a_store_that_hangs_stops_no_loop_and_each_of_its_calls_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    snapshots = Snapshots(WeightsConfig(store=str(tmp_path), load_timeout_s=0.2), "app", lambda: None)
    await snapshots.open()
    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "adopt", lambda *_: ends.wait(20))
        reading = snapshots.reading(MADE)
        for call in (snapshots.adopt(MADE), reading.__aenter__()):
            with pytest.raises(StoreFailed, match="did not answer within"):
                await call
        ends.set()
    await snapshots.close()


def written(folder: Path) -> str:
    """Return the name of a whole draft."""
    path, _ = claim_draft(folder)
    draft = Draft(path, "sim")
    draft.add([raw("weight", "float32", [1], bytes(4))])
    draft.finish()
    return path.name


def folders(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("index", "reason"), [('{"weight_map": {"a": "model-1.safetensors"}}', ""), ("{", "Expecting property name")]
)
async def test_a_checkpoint_whose_files_are_elsewhere_or_damaged_ends_no_gateway(
    tmp_path: Path, index: str, reason: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors.index.json").write_text(index)
    snapshots = Snapshots(WeightsConfig(store=str(tmp_path / "store")), "app", lambda: checkpoint)
    await snapshots.open()
    assert reason in snapshots.report()["reason"]
    assert bool(snapshots.report()["reason"]) == bool(reason)
    await snapshots.close()
