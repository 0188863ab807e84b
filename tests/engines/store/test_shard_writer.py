"""Files of a draft that are written beside each other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import StoreFailed
from engines.store import shard_writer
from engines.store.draft import Draft, claim_draft, raw
from engines.store.manifest import Manifest, check_bytes
from engines.store.shard_writer import ShardWriter


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


def test_a_file_that_cannot_be_written_is_told_by_the_end(draft: Draft) -> None:
    with ShardWriter(draft, 3) as writer:
        add_file(writer, 1)
        add_file(writer, 1)
        with pytest.raises(StoreFailed, match=r"'1\.a' came twice"):
            writer.finish()
