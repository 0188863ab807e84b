"""Versions that are brought near a worker before its engine stands still."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

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
    monkeypatch.setattr(prefetch, "read_tensors", lambda path, _: read_tensors(path, HOST))
    monkeypatch.setattr(prefetch, "copy_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("current_stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
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


def test_what_went_wrong_is_told_and_leaves_nothing_to_take(folder: Path) -> None:
    def fetch() -> None:
        raise OSError("no peer")

    one = Prefetch(folder, HOST, fetch)
    with pytest.raises(OSError, match="no peer"):
        until_ready(one)
    assert one.take(folder) is None


def until_ended(one: Prefetch) -> None:
    one._thread.join(SOON_S)
    assert not one._thread.is_alive()


def test_a_drop_during_the_read_ends_it_and_the_next_read_has_its_room(
    folder: Path, room: Iterator[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (free,) = room
    may_go_on, has_fetched = threading.Event(), threading.Event()
    later: list[str] = []

    def slow(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(6)
        free[0] = 0
        assert may_go_on.wait(SOON_S)
        try:
            for name in ("b", "c"):
                later.append(name)
                yield name, torch.ones(3)
        finally:
            free[0] = 30

    monkeypatch.setattr(prefetch, "read_tensors", slow)
    first = Prefetch(folder, GPU)
    deadline = time.monotonic() + SOON_S
    while free[0]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    first.drop()
    monkeypatch.setattr(prefetch, "read_tensors", lambda path, _: read_tensors(path, HOST))
    second = Prefetch(folder, GPU, has_fetched.set)
    assert has_fetched.wait(SOON_S)
    may_go_on.set()
    until_ended(first)
    until_ready(second)
    assert later == ["b"]
    assert first.take(folder) is None
    assert dict(second.take(folder) or []).keys() == {"w", "b"}


def test_a_failed_read_keeps_no_tensor(
    folder: Path, room: Iterator[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def broken(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        tensor = torch.ones(6)
        kept.append(weakref.ref(tensor))
        yield "w", tensor
        raise OSError("cut off")

    monkeypatch.setattr(prefetch, "read_tensors", broken)
    gc.disable()  # which would hide it, sooner or later
    try:
        one = Prefetch(folder, GPU)
        until_ended(one)
        assert kept[0]() is None
    finally:
        gc.enable()
    with pytest.raises(OSError, match="cut off"):
        until_ready(one)
