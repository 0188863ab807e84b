"""The gloo weight transport between a sender and receivers, as threads of this process and as processes that die."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import WeightUpdateFailed
from engines.process.port import free_port
from engines.transfer import gloo
from engines.transfer.gloo import WeightGroup
from engines.transfer.packing import CHUNK_BYTES, packed

TIMEOUT_S = 20.0
SOON_S = 30.0
"""Well under TIMEOUT_S: whoever ends this soon did not wait for the time to run out."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=8) as executor:
        yield executor


def with_timeout(groups: list[WeightGroup], timeout_s: float) -> list[WeightGroup]:
    """Bound the groups' next waits; a busy machine needs longer to join."""
    for group in groups:
        group._timeout_s = timeout_s
    return groups


def joined(pool: ThreadPoolExecutor, world_size: int) -> list[WeightGroup]:
    port = free_port()
    groups = [WeightGroup("127.0.0.1", port, rank, world_size, TIMEOUT_S) for rank in range(world_size)]
    for joining in [pool.submit(group.join) for group in groups]:
        joining.result()
    return groups


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("wide", torch.randn(7, 33, generator=generator)),
        ("turned", torch.randn(4, 6, generator=generator).t()),
        ("half", torch.randn(65, generator=generator).to(torch.bfloat16)),
        ("whole", torch.arange(5)),
        ("one", torch.tensor(2.5)),
    ]


def announced(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.dtype, list[int]]]:
    return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors]


def close_all(groups: list[WeightGroup]) -> None:
    for group in groups:
        group.close()


def error_of(future: "Future[Any]", within_s: float) -> BaseException | None:
    return future.exception(timeout=within_s)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_receivers_get_what_was_sent_whatever_the_chunk_size(pool: ThreadPoolExecutor, chunk_bytes: int) -> None:
    groups = joined(pool, 3)
    sent = some_tensors()
    arrived: list[list[tuple[str, torch.Tensor]]] = [[], []]
    receiving = [
        pool.submit(group.receive, announced(sent), got.extend, chunk_bytes)
        for group, got in zip(groups[1:], arrived, strict=True)
    ]
    groups[0].send(iter(sent), chunk_bytes)
    for future in receiving:
        future.result(timeout=TIMEOUT_S)
    for got in arrived:
        assert [name for name, _ in got] == [name for name, _ in sent]
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(got, sent, strict=True))
    close_all(groups)


@pytest.mark.filterwarnings("ignore:Tensor '.*' has size")
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_chunks_are_those_of_vllms_packed_transfer(chunk_bytes: int) -> None:
    vllm = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    assert vllm.DEFAULT_PACKED_BUFFER_SIZE_BYTES == CHUNK_BYTES
    ours, theirs = packed(some_tensors(), chunk_bytes), iter(some_tensors())
    while (chunk := vllm.pack_tensors(theirs, lambda named: named[1], chunk_bytes)) is not None:
        assert torch.equal(next(ours), chunk.packed_tensor)
    assert next(ours, None) is None


def test_a_sender_hears_at_once_that_a_receiver_left(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 3)
    other = pool.submit(groups[2].broadcast, torch.empty(8))
    sending = pool.submit(groups[0].broadcast, torch.ones(8))
    groups[1].close("ValueError: no such tensor")
    error = error_of(sending, SOON_S)
    assert isinstance(error, WeightUpdateFailed)
    assert "rank 1: ValueError: no such tensor" in str(error)
    assert isinstance(error_of(other, SOON_S), WeightUpdateFailed), "the receiver left behind waits on"


def test_a_sender_can_be_told_to_give_up(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 2)
    sending = pool.submit(groups[0].broadcast, torch.ones(8))
    groups[0].give_up("/update_weights failed: 409")
    error = error_of(sending, SOON_S)
    assert isinstance(error, WeightUpdateFailed)
    assert "/update_weights failed: 409" in str(error)


def test_a_receiver_is_let_go_when_the_sender_closes(pool: ThreadPoolExecutor) -> None:
    groups = joined(pool, 2)
    receiving = pool.submit(groups[1].broadcast, torch.empty(8))
    time.sleep(0.2)  # Let it get into gloo itself.
    groups[0].close()
    assert isinstance(error_of(receiving, SOON_S), WeightUpdateFailed)


def test_a_broadcast_that_nobody_joins_ends_in_time(pool: ThreadPoolExecutor) -> None:
    groups = with_timeout(joined(pool, 3), 0.5)
    sending = pool.submit(groups[0].broadcast, torch.ones(8))
    error = error_of(sending, SOON_S)
    assert "waited 0.5 s for all ranks to receive: 1 of 3 did" in str(error)
    close_all(groups)


@pytest.mark.parametrize("num_awaited", [7, 9])
def test_a_receiver_told_of_another_size_says_so(pool: ThreadPoolExecutor, num_awaited: int) -> None:
    groups = joined(pool, 2)
    sending = pool.submit(groups[0].broadcast, torch.ones(8, dtype=torch.uint8))
    with pytest.raises(WeightUpdateFailed, match=f"{num_awaited} bytes were announced, but the sender sends 8"):
        groups[1].broadcast(torch.empty(num_awaited, dtype=torch.uint8))
    assert f"{num_awaited} bytes were announced" in str(error_of(sending, SOON_S)), "the sender was not told"


def test_joining_alone_ends_in_time() -> None:
    group = WeightGroup("127.0.0.1", free_port(), 0, 2, timeout_s=0.2)
    with pytest.raises(WeightUpdateFailed, match=r"rank 0 of 2 could not join at 127\.0\.0\.1:\d+: waited 0\.2 s"):
        group.join()


def test_a_receiver_whose_sender_has_died_is_free_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "LISTENS_S", 0.2)
    group = WeightGroup("127.0.0.1", free_port(), 1, 2)
    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=r"rank 1 of 2 could not join at .*: the trainer does not listen"):
        group.join()
    assert time.monotonic() - began < SOON_S


RECEIVER_THAT_STALLS = """
import sys
from engines.transfer.gloo import WeightGroup
group = WeightGroup("127.0.0.1", int(sys.argv[1]), 1, 2)
group.join()
group._store.add("ready/1", 1)
sys.stdin.read()
"""


def test_a_sender_raises_when_a_receiver_is_killed_mid_broadcast(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    group = WeightGroup("127.0.0.1", port, 0, 2, timeout_s=60.0)
    joining = pool.submit(group.join)
    command = [sys.executable, "-c", RECEIVER_THAT_STALLS, str(port)]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE) as receiver:
        joining.result(timeout=60.0)
        sending = pool.submit(group.broadcast, torch.ones(50_000_000, dtype=torch.uint8))
        time.sleep(0.5)
        assert not sending.done(), "the receiver takes nothing, so the sender must be blocked"
        receiver.kill()
        assert isinstance(error_of(sending, SOON_S), WeightUpdateFailed)
