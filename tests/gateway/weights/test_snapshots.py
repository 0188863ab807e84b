"""The store of a gateway, where its folder leaves while it serves."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.errors import StoreFailed
from engines.store.draft import Draft, claim_draft, raw
from engines.store.weight_store import WeightStore
from engines.types import EngineKind
from gateway.config.schema import WeightsConfig
from gateway.weights.snapshots import Snapshots


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


async def test_where_the_folder_cannot_be_made_again_the_reason_is_told_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    snapshots = Snapshots(WeightsConfig(store=str(folder)), "app", lambda: None)
    await snapshots.open()
    try:
        assert await snapshots.why_not(1) == ""
        shutil.rmtree(folder)
        folder.touch()
        assert "File exists" in await snapshots.why_not(1)
        assert await snapshots.draft(0, 1) is None
        folder.unlink()
        assert await snapshots.why_not(1) == ""
    finally:
        await snapshots.close()


class _Death(Exception):
    """The gateway ends here."""


async def test_a_gateway_that_dies_at_any_moment_of_a_commit_leaves_no_record_of_a_version_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [replica("a"), replica("b")]
    deaths = 0
    for lived_through in range(3):
        folder, left = tmp_path / str(lived_through), lived_through

        def until_death(name: str) -> Any:
            method = getattr(WeightStore, name)

            def call(*arguments: Any) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise _Death
                method(*arguments)

            return call

        snapshots = Snapshots(WeightsConfig(store=str(folder)), "app", lambda: None)
        await snapshots.open()
        await snapshots.promote(written(folder), 1, 0, [])
        with monkeypatch.context() as patch:
            for name in ("note_held", "note_holders"):
                patch.setattr(WeightStore, name, until_death(name))
            try:
                await snapshots.note_holders(1, replicas)
            except _Death:
                deaths += 1
        await snapshots.close()
        next_store = WeightStore(folder)
        for incarnation in ("a", "b"):
            is_noted = next_store.held_by(incarnation).version == 1
            assert next_store.adopt(1, incarnation) or not is_noted, lived_through
        next_store.close()
    assert deaths == 2


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
        await snapshots.promote(written(tmp_path), 1, 0, [])
    await snapshots.withdraw(1)
    may_begin.set()
    assert await asyncio.to_thread(ended.wait, 20)
    await snapshots.removed()
    assert snapshots.versions == []
    assert folders(tmp_path) == []
    await snapshots.close()


async def test_a_trainer_that_leaves_while_its_draft_is_made_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, begun = WeightStore.draft, threading.Event()

    def draft_late(self: WeightStore) -> Path:
        begun.set()
        time.sleep(0.2)
        return draft(self)

    monkeypatch.setattr(WeightStore, "draft", draft_late)
    snapshots = Snapshots(WeightsConfig(store=str(tmp_path)), "app", lambda: None)
    await snapshots.open()
    claiming = asyncio.create_task(snapshots.claim(0, 1))
    assert await asyncio.to_thread(begun.wait, 20)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    await asyncio.sleep(0.4)
    await snapshots.removed()
    assert folders(tmp_path) == []
    await snapshots.close()


async def test_a_store_that_hangs_stops_no_loop_and_holds_replicas_no_longer_than_a_control_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ends, replicas = asyncio.get_running_loop(), threading.Event(), [replica("a"), replica("b")]
    config = WeightsConfig(store=str(tmp_path), load_timeout_s=20.0, control_timeout_s=0.2)
    snapshots = Snapshots(config, "app", lambda: None)
    await snapshots.open()
    name = written(tmp_path)
    await snapshots.promote(written(tmp_path), 1, 0, [])

    def hang(*_: Any) -> Any:
        assert ends.wait(20)
        raise OSError("the mount was gone")

    @contextmanager
    def hang_first(*_: Any) -> Iterator[Path]:
        hang()
        yield tmp_path

    with monkeypatch.context() as patch:
        for call in ("named", "note_holders", "note_held"):
            patch.setattr(WeightStore, call, hang)
        patch.setattr(WeightStore, "reading", hang_first)
        began = loop.time()
        await snapshots.note_holders(1, replicas)
        calls = [snapshots.announced(name, 0), snapshots.promote(name, 2, 0, []), anext(opened(snapshots))]
        running = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.1)
        assert loop.time() - began < 5
        ends.set()
        assert all(isinstance(one, StoreFailed) for one in await asyncio.gather(*running, return_exceptions=True))
    await snapshots.close()


async def test_a_store_that_hangs_leaves_other_files_their_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own threads are few."""
    ends = threading.Event()
    config = WeightsConfig(store=str(tmp_path), load_timeout_s=20.0, control_timeout_s=0.05)
    snapshots = Snapshots(config, "app", lambda: None)
    await snapshots.open()
    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "note_held", lambda *_: ends.wait(20))
        for _ in range(40):
            await snapshots.note_overwritten([replica("a")])
        try:
            async with asyncio.timeout(5):
                assert await asyncio.to_thread(lambda: True)
        finally:
            ends.set()
    await snapshots.close()


async def test_the_end_waits_for_a_copy_that_hangs_no_longer_than_a_control_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ends = asyncio.get_running_loop(), threading.Event()
    config = WeightsConfig(store=str(tmp_path), load_timeout_s=20.0, control_timeout_s=0.3)
    snapshots = Snapshots(config, "app", lambda: None)
    await snapshots.open()

    async def never(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await snapshots.discard(tmp_path / "draft")

    monkeypatch.setattr(WeightStore, "throw_away", lambda *_: ends.wait(20))
    monkeypatch.setattr(snapshots, "_keep", never)
    snapshots.keep(tmp_path / "draft", 1, replica("a"), [], {})
    await asyncio.sleep(0)
    began = loop.time()
    await snapshots.close()
    ends.set()
    assert loop.time() - began < 10


async def opened(snapshots: Snapshots) -> AsyncIterator[Path]:
    async with snapshots.reading(1, []) as path:
        yield path


def replica(incarnation: str) -> Any:
    engine = SimpleNamespace(tells_version=False)
    info = SimpleNamespace(incarnation=incarnation, kind=EngineKind.SIM)
    return SimpleNamespace(info=info, engine=engine)


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
