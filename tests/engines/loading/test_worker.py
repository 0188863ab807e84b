"""The updates of one worker: which loads of received tensors keep the weights before."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading.draft import Draft
from engines.loading.planned_load import PlannedLoad
from engines.loading.stage import FolderStage
from engines.loading.worker import Target, UpdatedWorker

SENT = [("weight", torch.ones(2))]


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def target(*, obstacle: str = "", draft: Draft | None = None) -> Target:
    one = Target(
        device=torch.device("cpu"), weights=PlannedLoad(Model()), obstacle=obstacle, draft=draft or Draft("ngram")
    )
    one.begin()
    return one


def test_a_load_in_place_keeps_the_weights_before() -> None:
    assert target().exchange(SENT) is not None


def test_a_model_that_its_engine_loads_does_not() -> None:
    quantized = target(obstacle="quantization fp8")
    assert quantized.exchange(SENT) is None
    assert quantized.has_moved


@pytest.mark.parametrize("reason", ["", "its checkpoint is its own"])
def test_a_draft_that_takes_tensors_too_would_stay_behind_and_any_other_does_not(reason: str) -> None:
    one = target(draft=Draft("mtp", Model(), Model(), reason))
    assert (one.exchange(SENT) is None) == (not reason)
    assert target(draft=Draft("ngram")).exchange(SENT) is not None


class Worker(UpdatedWorker):
    target = target()
    loaded: Any = None

    def load_version(self, folder: Path, stage: FolderStage | None) -> None:
        self.loaded = stage


class Read(FolderStage):
    """A version that was read ahead."""

    is_dropped = False

    def holds(self, folder: Path) -> bool:
        return True

    def drop(self) -> None:
        self.is_dropped = True


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    worker = Worker()
    worker.stage = Read(tmp_path, torch.device("cpu"))
    return worker
