"""Files of a draft that are written beside each other."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engines.errors import StoreFailed
from engines.store import shard_writer
from engines.store.changed_elements import ChangedElements
from engines.store.draft import ChangedTensor, Draft, RawTensor, WriteFile, claim_draft, raw
from engines.store.manifest import Manifest, check_bytes
from engines.store.shard_writer import ShardWriter

SOON_S = 30.0


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draft:
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 10)
    return Draft(claim_draft(tmp_path)[0], "m")


def add_file(writer: ShardWriter, index: int, written: Callable[[], None] = lambda: None) -> None:
    """Add the tensors of one file."""
    for name in "ab":
        writer.add(raw(f"{index}.{name}", "uint8", [5], bytes([index]) * 5), written)


def test_all_files_are_in_the_draft_in_which_they_were_written(draft: Draft) -> None:
    with ShardWriter(draft, 3) as writer:
        for index in range(20):
            add_file(writer, index)
        writer.finish()
        draft.finish()
    assert len(check_bytes(draft.folder).tensors) == 40
    assert {tensor.file for tensor in Manifest.read(draft.folder).tensors.values()} == {
        f"model-{number:05d}.safetensors" for number in range(1, 21)
    }


def test_files_are_written_beside_each_other_and_no_more_than_may_be(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, let_go, begun = threading.Barrier(4), threading.Event(), []

    def add(_: Draft, tensors: Sequence[RawTensor], write: WriteFile) -> None:
        begun.append(tensors)
        if len(begun) <= 3:
            together.wait(SOON_S)
            assert let_go.wait(SOON_S)

    monkeypatch.setattr(Draft, "add", add)
    with ShardWriter(draft, 3) as writer:
        for index in range(3):
            add_file(writer, index)
        together.wait(SOON_S)
        fourth = threading.Thread(target=add_file, args=(writer, 3))
        fourth.start()
        fourth.join(0.1)
        assert fourth.is_alive(), "it waits for one of the others"
        assert len(begun) == 3
        let_go.set()
        fourth.join(SOON_S)
        writer.finish()
    assert len(begun) == 4


def test_changed_elements_have_files_of_their_own(draft: Draft) -> None:
    elements = ChangedElements.between(np.zeros(4, np.uint8), np.ones(4, np.uint8), 1)
    with ShardWriter(draft, 3) as writer:
        add_file(writer, 1)
        writer.add(ChangedTensor("c", "uint8", [4], "xxh3_128:2", "xxh3_128:1", elements))
        writer.finish()
        draft.finish()
    assert {path.name for path in draft.folder.glob("*-*.*") if path.suffix != ".json"} == {
        "model-00001.safetensors",
        "changes-00002.delta",
    }


def test_who_waits_for_the_memory_is_told_when_its_file_is_there(draft: Draft) -> None:
    told: list[int] = []
    with ShardWriter(draft, 3) as writer:
        for index in range(5):
            add_file(writer, index, partial(told.append, index))
        writer.finish()
    assert sorted(told) == sorted([*range(5), *range(5)])


def test_a_file_that_cannot_be_written_is_told_by_the_end(draft: Draft) -> None:
    with ShardWriter(draft, 3) as writer:
        add_file(writer, 1)
        add_file(writer, 1)
        with pytest.raises(StoreFailed, match=r"'1\.a' came twice"):
            writer.finish()


def test_nothing_is_written_once_it_is_left(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, begun = threading.Event(), []

    def add(_: Draft, tensors: Sequence[RawTensor], write: WriteFile) -> None:
        begun.append(tensors)
        assert let_go.wait(SOON_S)

    monkeypatch.setattr(Draft, "add", add)

    def broken_off() -> None:
        with ShardWriter(draft, 3) as writer:
            for index in range(3):
                add_file(writer, index)
            threading.Timer(0.1, let_go.set).start()
            raise KeyError("the trainer's iterator")

    with pytest.raises(KeyError):
        broken_off()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]
