"""Receipts: an update is copied into a draft on its way into a model."""

import threading
import time
from collections.abc import Iterable

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
from engines.transfer import scribe
from engines.transfer.receipts import Receipts
from engines.transfer.scribe import Scribe

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


def opened(store: WeightStore, model: PlayedModel, wait_s: float = 5.0) -> Receipts:
    receipts = Receipts()
    receipts.open(model, copy=ReceiptCopy(draft=str(store.draft()), model="m", base="", names=(), wait_s=wait_s))
    return receipts


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(5, 3, dtype=torch.bfloat16), "b": torch.randn(7), "odd": torch.ones(3, dtype=torch.uint8)}


def test_the_model_loads_what_it_did_before() -> None:
    model, sent, receipts = PlayedModel(), tensors(), Receipts()
    receipts.open(model)
    assert model.load_weights(iter(sent.items())) == set(sent)
    receipts.close()
    assert all(torch.equal(model.loaded[name], tensor) for name, tensor in sent.items())
    assert "load_weights" not in vars(model)


def test_what_was_received_is_written_chunk_by_chunk(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 30)
    model, sent = PlayedModel(), tensors()
    receipts = opened(store, model)
    chunk = {name: tensor.clone() for name, tensor in sent.items()}
    for name, tensor in chunk.items():
        model.load_weights([(name, tensor)])
        tensor.zero_()  # the receiver uses its buffer again
    receipts.close()
    receipts.kept()
    (draft,) = store.folder.glob("draft-*")
    assert is_whole(draft)
    assert len({one.file for one in check_bytes(draft).tensors.values()}) == 2
    found = {name: tensor for file in draft.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_a_copy_waits_until_it_is_kept(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scribe, "has_room", lambda *_: True)  # as on a GPU, where nothing waits for the disk
    model = PlayedModel()
    receipts = opened(store, model)
    model.load_weights(iter(tensors().items()))
    receipts.close()
    time.sleep(A_MOMENT_S)
    (draft,) = store.folder.glob("draft-*")
    assert not list(draft.glob("*.safetensors*"))
    receipts.kept()
    assert is_whole(draft)


def test_the_transfer_does_not_wait_for_a_slow_disk_beyond_the_bound(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", 1)
    monkeypatch.setattr(scribe, "_BUDGET_BYTES", 40)
    gate = threading.Event()
    monkeypatch.setattr(Draft, "add", lambda *_: gate.wait(SOON_S))
    model, sent = PlayedModel(), tensors()
    receipts = opened(store, model, wait_s=0.2)
    for _ in range(3):
        model.load_weights(list(sent.items()))
    receipts.close()
    gate.set()
    receipts.kept()
    (draft,) = store.folder.glob("draft-*")
    with pytest.raises(StoreFailed, match=r"too slow \(weights\.store_wait_s\)"):
        is_whole(draft)


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ((Draft, "add"), StoreFailed("no space"), "no space"),
        ((Scribe, "put"), torch.OutOfMemoryError("no memory"), "could not copy .*: no memory"),
    ],
)
def test_a_full_disk_or_memory_costs_the_draft_and_not_the_update(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str], error: Exception, said: str
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(*place, full)
    model, sent = PlayedModel(), tensors()
    receipts = opened(store, model)
    for named in sent.items():
        model.load_weights([named])
    receipts.close()
    assert model.loaded.keys() == sent.keys()
    receipts.kept()
    (draft,) = store.folder.glob("draft-*")
    with pytest.raises(StoreFailed, match=said):
        is_whole(draft)
