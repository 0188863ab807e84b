"""Versions that are brought near a worker before its engine stands still."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from engines.loading import prefetch
from engines.loading.prefetch import Prefetch
from engines.loading.snapshot_reader import read_tensors

SOON_S = 30.0
GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"w": torch.arange(6, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")  # 24 and 6 bytes
    return tmp_path


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of the GPU that are free; its memory is the host's."""
    free = [30]
    monkeypatch.setattr(prefetch, "room_on", lambda _: free[0])
    monkeypatch.setattr(Prefetch, "_read", lambda self: list(read_tensors(self._path, HOST)))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    return iter([free])


def until_ready(one: Prefetch) -> None:
    deadline = time.monotonic() + SOON_S
    while not one.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_fits_waits_in_the_gpu_and_is_taken_once(folder: Path, room: Iterator[list[int]]) -> None:
    one = Prefetch(folder, GPU)
    until_ready(one)
    taken = dict(one.take(folder) or [])
    assert set(taken) == {"w", "b"}
    assert torch.equal(taken["w"], torch.arange(6, dtype=torch.float32))
    assert one.take(folder) is None


def test_what_does_not_fit_is_read_with_the_load(folder: Path, room: Iterator[list[int]]) -> None:
    next(room)[0] = 29
    one = Prefetch(folder, GPU)
    until_ready(one)
    assert one.take(folder) is None


def test_a_folder_that_has_become_another_is_not_the_one_that_was_read(folder: Path, room: Iterator[list[int]]) -> None:
    one = Prefetch(folder, GPU)
    until_ready(one)
    assert one.is_of(folder)
    assert not one.is_of(folder / "v2")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)  # as long, and of the same name
    assert not one.is_of(folder)
    assert one.take(folder) is None


def test_it_is_ready_once_it_was_fetched_and_not_before(folder: Path) -> None:
    may_end = threading.Event()
    one = Prefetch(folder, HOST, lambda: may_end.wait(SOON_S))
    assert not one.is_ready
    may_end.set()
    until_ready(one)
    assert one.take(folder) is None


def test_a_load_of_another_folder_does_not_wait_for_it(folder: Path) -> None:
    may_end = threading.Event()
    one = Prefetch(folder, HOST, lambda: may_end.wait(SOON_S))
    assert one.take(folder / "v2") is None
    assert not one.is_ready, "it is still under way"
    may_end.set()
    until_ready(one)


def test_what_went_wrong_is_told_and_leaves_nothing_to_take(folder: Path) -> None:
    def fetch() -> None:
        raise OSError("no peer")

    one = Prefetch(folder, HOST, fetch)
    with pytest.raises(OSError, match="no peer"):
        until_ready(one)
    assert one.take(folder) is None
