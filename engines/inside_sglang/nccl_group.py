"""A worker's place in the NCCL group of vLLM's trainer: rendezvous, packed chunks, bounded waits, an abort.

The protocol is vLLM's (0.28 to 0.32): a TCPStore of the trainer with the NCCL id, one all-reduce of one number, then a
broadcast of each packed chunk. A collective that a peer has left never ends by itself. So the host never waits in CUDA
or NCCL: it polls, looks at the trainer's store meanwhile, and aborts the communicator.
"""

import ctypes
import pickletools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from engines.errors import WeightUpdateFailed
from engines.transfer.gloo import SENDER_RANK, Load, until_listening
from engines.transfer.packing import CHUNK_BYTES, Announced, chunks, kept_streams, num_bytes, unpacked_as

KEY = "broadcast_from/0/0"
"""Key of the NCCL id: the first object that rank 0 broadcasts."""
_ID_BYTES = 128
_POLL_S = 0.0002
_LOOK_S = 0.2
"""Time between two looks at the trainer's store."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A chunk whose broadcast has been started on `stream`, and ends with `arrived`."""

    announced: list[Announced]
    content: torch.Tensor
    stream: Any
    arrived: Any


class NcclGroup:
    """One trainer (rank 0) and all workers of all engines. The first failure breaks the group for good."""

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, timeout_s: float, device: Any, buffers: int
    ) -> None:
        """`address` and `port` are the trainer's store. `join` connects. `buffers` chunks are under way at a time."""
        self._address = address
        self._port = port
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._device = device
        self._buffers = buffers
        self._store: dist.TCPStore | None = None
        self._nccl: Any = None
        self._comm: Any = None
        self._streams: list[Any] = []

    def join(self) -> None:
        """Wait for all ranks and connect. Raise `WeightUpdateFailed` after `timeout_s`, or when the trainer leaves."""
        deadline = time.monotonic() + self._timeout_s
        place = f"rank {self._rank} of {self._world_size} at {self._address}:{self._port}"
        try:
            until_listening(self._address, self._port, self._timeout_s)
            self._store = dist.TCPStore(
                self._address, self._port, self._world_size, is_master=False,
                timeout=timedelta(seconds=self._timeout_s), use_libuv=False,
            )  # fmt: skip
            unique_id = unique_id_of(self._store.get(KEY))
            self._connect(unique_id, deadline, place)
            self._streams = kept_streams(self._device, self._buffers)
            self._warm_up(deadline)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise WeightUpdateFailed(
                f"{place} could not join the trainer's NCCL group: {error}. The trainer needs the NCCL release of this "
                f"engine, which is {self._nccl.ncclGetVersion() if self._nccl else 'unknown'}"
            ) from error

    def receive(
        self,
        announced: Iterable[Announced],
        load: Load,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 0.0,
    ) -> None:
        """Receive the announced tensors; pass each chunk to `load`, beside the broadcasts of the next.

        Return when all are loaded on the device. Raise `WeightUpdateFailed` after `timeout_s`, by default the group's.
        """
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        if self._comm is None:
            raise WeightUpdateFailed("the NCCL group is not joined, or broken: open it again")
        try:
            for arriving in self._ahead(self._begun(announced, chunk_bytes)):
                self._wait(arriving.arrived, deadline)
                with torch.cuda.stream(arriving.stream):
                    load(unpacked_as(arriving.announced, arriving.content))
            for stream in self._streams:
                done = torch.cuda.Event()
                done.record(stream)
                self._wait(done, deadline)
        except RuntimeError as error:
            self.close()
            raise WeightUpdateFailed(f"rank {self._rank} of {self._world_size} lost the NCCL group: {error}") from error

    def close(self, reason: str = "") -> None:
        """Leave the group, also under a collective. May be called twice."""
        comm, self._comm = self._comm, None
        self._store = None
        if comm is not None:
            abort = self._nccl.lib.ncclCommAbort  # SGLang's wrapper does not have it
            abort.restype, abort.argtypes = ctypes.c_int, [ctypes.c_void_p]
            abort(comm)

    def _connect(self, unique_id: bytes, deadline: float, place: str) -> None:
        """Make the communicator on a thread: NCCL waits for all ranks without a limit."""
        from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclUniqueId

        self._nccl = nccl = NCCLLibrary()
        theirs = ncclUniqueId()
        ctypes.memmove(ctypes.addressof(theirs), unique_id, len(unique_id))
        made: list[Any] = []
        failed: list[Exception] = []

        def make() -> None:
            try:
                torch.cuda.set_device(self._device)
                made.append(nccl.ncclCommInitRank(self._world_size, theirs, self._rank))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=make, name=f"nccl {place}", daemon=True)
        thread.start()
        self._until(lambda: not thread.is_alive(), deadline, "for all ranks to join")
        if failed:
            raise RuntimeError(str(failed[0])) from failed[0]
        self._comm = made[0]

    def _warm_up(self, deadline: float) -> None:
        """Take part in the trainer's first collective, without which its first broadcast would wait for ever."""
        from sglang.srt.distributed.device_communicators import pynccl_wrapper as names

        with torch.cuda.stream(self._streams[0]):
            number, total = (torch.zeros(1, device=self._device) for _ in range(2))
            self._nccl.ncclAllReduce(
                names.buffer_type(number.data_ptr()), names.buffer_type(total.data_ptr()), 1,
                names.ncclDataTypeEnum.ncclFloat32, names.ncclRedOpTypeEnum.ncclSum, self._comm,
                names.cudaStream_t(self._streams[0].cuda_stream),
            )  # fmt: skip
            done = torch.cuda.Event()
            done.record()
        self._wait(done, deadline)

    def _begun(self, announced: Iterable[Announced], chunk_bytes: int) -> Iterator[_Arriving]:
        """Start the broadcast of each chunk, on the streams in turn."""
        for chunk, stream in zip(chunks(announced, chunk_bytes), cycle(self._streams), strict=False):
            with torch.cuda.stream(stream):
                # New memory for each chunk: the scribe may keep a chunk until it is written. torch's allocator hands
                # out freed memory of the same stream again.
                content = torch.empty(sum(map(num_bytes, chunk)), dtype=torch.uint8, device=self._device)
                self._broadcast(content, stream)
                arrived = torch.cuda.Event()
                arrived.record()
            yield _Arriving(chunk, content, stream, arrived)

    def _broadcast(self, content: torch.Tensor, stream: Any) -> None:
        from sglang.srt.distributed.device_communicators import pynccl_wrapper as names

        place = names.buffer_type(content.data_ptr())
        self._nccl.ncclBroadcast(
            place, place, content.numel(), names.ncclDataTypeEnum.ncclUint8, SENDER_RANK, self._comm,
            names.cudaStream_t(stream.cuda_stream),
        )  # fmt: skip

    def _ahead(self, arriving: Iterator[_Arriving]) -> Iterator[_Arriving]:
        """Yield each chunk once the broadcasts of the next are started, one for each other buffer."""
        started: deque[_Arriving] = deque()
        for chunk in arriving:
            started.append(chunk)
            if len(started) == self._buffers:
                yield started.popleft()
        yield from started

    def _wait(self, done: Any, deadline: float) -> None:
        self._until(done.query, deadline, "for all ranks to receive")
        if self._comm is None:  # what an aborted broadcast has left is no tensor
            raise RuntimeError("the group was left meanwhile")

    def _until(self, condition: Callable[[], bool], deadline: float, purpose: str) -> None:
        """Return when `condition` holds. Raise `RuntimeError` at `deadline`, or when the trainer's store is gone."""
        look_at = time.monotonic() + _LOOK_S
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError(f"waited too long {purpose}")
            if now > look_at and self._store is not None:
                self._store.check([KEY])  # raises without a connection
                look_at = now + _LOOK_S
            time.sleep(_POLL_S)


def unique_id_of(pickled: bytes) -> bytes:
    """Return the NCCL id in a pickled ctypes structure: the only byte string of its length. Raise `ValueError` where
    there is none, or more. Nothing is unpickled: that would need vLLM, and would run what the sender names."""
    arguments = [argument for _, argument, _ in pickletools.genops(pickled)]
    found = {one for one in arguments if isinstance(one, bytes) and len(one) == _ID_BYTES}
    if len(found) != 1:
        raise ValueError(f"the trainer's store holds {len(found)} NCCL ids instead of one: is its vLLM 0.28 or later?")
    return found.pop()
