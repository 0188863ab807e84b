"""The tee: an update is digested on its way into a model, and copied into a draft."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from engines.engine import ReceiptCopy
from engines.errors import StoreFailed
from engines.store import shard_writer
from engines.store.draft import Draft, is_whole
from engines.store.manifest import check_bytes
from engines.store.weight_store import WeightStore
from engines.transfer import tee as weight_tee
from engines.transfer.tee import Scribe, WeightTee
from engines.transfer.tensor_bytes import digest_on_host

SOON_S = 30.0
A_MOMENT_S = 0.2


class PlayedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        arrived = {name: tensor.clone() for name, tensor in weights}
        self.loaded |= arrived
        return set(arrived)


def scribe(store: WeightStore, names: Sequence[str] = (), base: Path | None = None, wait_s: float = 5.0) -> Scribe:
    copy = ReceiptCopy(draft=str(store.draft()), model="m", base=str(base or ""), names=tuple(names), wait_s=wait_s)
    return Scribe(copy)


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(5, 3, dtype=torch.bfloat16), "b": torch.randn(7), "odd": torch.ones(3, dtype=torch.uint8)}


def test_the_model_loads_what_it_did_before_and_the_tee_tells_digests() -> None:
    model, sent = PlayedModel(), tensors()
    tee = WeightTee(model)
    assert model.load_weights(iter(sent.items())) == set(sent)
    assert tee.close() == {name: digest_on_host(tensor) for name, tensor in sent.items()}
    assert all(torch.equal(model.loaded[name], tensor) for name, tensor in sent.items())
    assert "load_weights" not in vars(model)


def test_the_scribe_writes_what_was_received_chunk_by_chunk(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 30)
    model, sent, writer = PlayedModel(), tensors(), scribe(store)
    tee = WeightTee(model, writer)
    chunk = {name: tensor.clone() for name, tensor in sent.items()}
    for name, tensor in chunk.items():
        model.load_weights([(name, tensor)])
        tensor.zero_()  # the receiver uses its buffer again
    digests = tee.close()
    writer.keep()
    assert writer.join(SOON_S)
    (draft,) = store.folder.glob("draft-*")
    assert is_whole(draft)
    manifest = check_bytes(draft)
    assert {name: one.digest for name, one in manifest.tensors.items()} == digests
    assert len({one.file for one in manifest.tensors.values()}) == 2
    found = {name: tensor for file in draft.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_a_copy_waits_until_it_is_kept(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scribe, "has_room", lambda *_: True)  # as on a GPU, where nothing waits for the disk
    model, writer = PlayedModel(), scribe(store)
    tee = WeightTee(model, writer)
    model.load_weights(iter(tensors().items()))
    tee.close()
    assert not writer.join(A_MOMENT_S)
    (draft,) = store.folder.glob("draft-*")
    assert not list(draft.glob("*.safetensors*"))
    writer.keep()
    assert writer.join(SOON_S)
    assert is_whole(draft)


def test_the_transfer_does_not_wait_for_a_slow_disk_beyond_the_bound(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 1)
    monkeypatch.setattr(weight_tee, "_BUDGET_BYTES", 40)
    gate = threading.Event()
    monkeypatch.setattr(Draft, "add", lambda *_: gate.wait(SOON_S))
    model, sent, writer = PlayedModel(), tensors(), scribe(store, wait_s=0.2)
    tee = WeightTee(model, writer)
    for _ in range(3):
        model.load_weights(list(sent.items()))
    digests = tee.close()
    gate.set()
    assert digests.keys() == sent.keys()
    writer.keep()
    assert writer.join(SOON_S)
    (draft,) = store.folder.glob("draft-*")
    with pytest.raises(StoreFailed, match=r"too slow \(weights\.store_wait_s\)"):
        is_whole(draft)


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ((Draft, "add"), StoreFailed("no space"), "no space"),
        ((weight_tee, "digest_on_host"), torch.OutOfMemoryError("no memory"), "could not digest .*: no memory"),
    ],
)
def test_a_full_disk_or_memory_costs_the_draft_and_not_the_update(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str], error: Exception, said: str
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(*place, full)
    model, sent, writer = PlayedModel(), tensors(), scribe(store)
    tee = WeightTee(model, writer)
    for named in sent.items():
        model.load_weights([named])
    assert tee.close().keys() in (sent.keys(), set())
    assert model.loaded.keys() == sent.keys()
    writer.keep()
    assert writer.join(SOON_S)
    (draft,) = store.folder.glob("draft-*")
    with pytest.raises(StoreFailed, match=said):
        is_whole(draft)
