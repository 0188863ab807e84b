"""Files of tensors that leave a GPU in pieces, and digests made there. Tensors of the host stand for those of a GPU."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from engines.store.draft import RawTensor, write_file
from engines.transfer import gpu_files
from engines.transfer.gpu_files import pieces, write_any_file
from engines.transfer.tensor_bytes import runs, sum_on_device, where_it_is

PIECE_BYTES = 64


def received(count: int) -> list[RawTensor]:
    """Tensors in memory that was received packed, and ones that lie elsewhere."""
    packed = torch.randn(count * 6)
    parts = [packed[index * 6 : index * 6 + 6].view(2, 3) for index in range(count)]
    others = [torch.arange(5, dtype=torch.uint8), torch.zeros(0, 4), torch.randn(3, 4).t(), torch.tensor(2.5)]
    return [where_it_is(f"t{index}", tensor) for index, tensor in enumerate([*parts, *others])]


@pytest.mark.parametrize("count", [1, 2, 3, 40, 200])
def test_files_that_leave_in_pieces_have_the_bytes_of_the_tensors(tmp_path: Path, count: int) -> None:
    tensors = received(count)
    memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    write_file(path := tmp_path / "1.safetensors", tensors, pieces(tensors, memory, None))
    found = load_file(path)
    assert all(torch.equal(found[tensor.name], tensor.owner) for tensor in tensors)


@pytest.mark.parametrize("turns", [1, 2])
def test_so_many_files_leave_a_gpu_at_a_time_as_there_are_turns(
    tmp_path: Path, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay, which no engine runs in, has two turns."""
    started, may_end = queue.SimpleQueue[str](), threading.Event()

    def waiting(*_: Any) -> Iterator[memoryview]:
        started.put(threading.current_thread().name)
        assert may_end.wait(30)
        yield memoryview(b"tensor")

    monkeypatch.setattr(gpu_files, "turns", threading.Semaphore(turns))
    monkeypatch.setattr(gpu_files, "_pinned", queue.SimpleQueue())
    monkeypatch.setattr(gpu_files, "pin_memory", lambda: gpu_files._pinned.put(torch.empty(0)))
    monkeypatch.setattr(gpu_files, "pieces", waiting)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: None)
    there = RawTensor("t", "F16", [3], 0, 6, SimpleNamespace(is_cuda=True, device="cuda:0"))
    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(write_any_file, tmp_path / str(number), [there]) for number in range(3)]
        for _ in range(turns):
            started.get(timeout=30)
        with pytest.raises(queue.Empty):
            started.get(timeout=0.05)
        may_end.set()
    assert [one.result() for one in writing] == [[""]] * 3


def test_neighbours_are_one_run_and_others_are_not() -> None:
    tensors = [(one.name, one.owner) for one in received(3)]
    assert [(name, len(content)) for name, content in runs(tensors)] == [("t0", 72), ("t3", 5), ("t5", 48), ("t6", 4)]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 32, 69])
@pytest.mark.parametrize("place", [0, 3])
def test_each_byte_changes_the_sum(size: int, place: int) -> None:
    content = torch.randint(256, (place + size,), dtype=torch.uint8)[place:]
    total = sum_on_device(content)
    for changed in range(size):
        other = content.clone()
        other[changed] ^= 1
        assert sum_on_device(other) != total
