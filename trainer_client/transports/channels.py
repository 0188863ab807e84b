"""Channels: a transfer group with all workers of all engines, over gloo or NCCL.

Both have bounded waits. A gloo sender can be cancelled before it enters a broadcast; an NCCL communicator can be
aborted during one, from another thread.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from engines.errors import ConfigError, WeightUpdateFailed
from engines.transfer.gloo import SENDER_RANK, WeightGroup, send
from engines.transfer.packing import CHUNK_BYTES, NamedTensor, kept_streams, packed

_BUFFERS = 2
"""Chunks in memory at a time: one is packed while the other is broadcast."""
_POLL_S = 0.005
_ABORT_S = 5.0


class GlooChannel(WeightGroup):
    """Sends over TCP from host memory, to engines without CUDA."""

    def __init__(self, address: str, port: int, world_size: int, timeout_s: float) -> None:
        super().__init__(address, port, SENDER_RANK, world_size, timeout_s)

    def send(self, tensors: Iterator[NamedTensor]) -> None:
        """Broadcast announced tensors; `WeightUpdateFailed` on timeout or `give_up`."""
        send(tensors, self)


class NcclChannel:
    """Sends from GPU memory, as the packed sender of vLLM does, whose communicator it has."""

    def __init__(self, address: str, port: int, world_size: int, timeout_s: float, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                f"the engines receive over NCCL, but device is {str(device)!r}: set it to the trainer's GPU"
            )
        self._info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        self._place = f"{address}:{port}"
        self._timeout_s = timeout_s
        self._device = device
        self._group: Any = None
        self._given_up = threading.Event()
        self._reason = ""

    def listen(self) -> None:
        """Get ready to listen at once in `join`, which opens the listener. The import of vLLM takes seconds, in which
        engines that wait for the listener would make no token."""
        _trainer_init()

    def join(self) -> None:
        self._bounded(self._open, f"for all ranks to join at {self._place}")

    def send(self, tensors: Iterator[NamedTensor]) -> None:
        self._opened()
        self._bounded(lambda: self._broadcast(tensors), "for all ranks to receive")

    def give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._given_up.set()

    def close(self, reason: str = "closed the group") -> None:
        self.give_up(reason)
        group, self._group = self._group, None
        if group is None:
            return
        # Aborted, not destroyed: an abort does not wait. A broken communicator raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            group.nccl.ncclCommAbort(group.comm)
        # Closes the store's socket, on which the engines wait.
        group.group.store = None
        group.group.socket = None

    def _open(self) -> None:
        torch.cuda.set_device(self._device)
        self._group = _trainer_init()(self._info)

    def _broadcast(self, tensors: Iterator[NamedTensor]) -> None:
        """Broadcast chunk after chunk, each packed beside the broadcast of the chunk before.

        Tensors of a run are gathered together, and may be of two chunks: all are gathered and packed on one stream.
        """
        torch.cuda.set_device(self._device)
        packing, sending = kept_streams(self._device, 2)
        under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        with torch.cuda.stream(packing):
            for chunk in packed(((name, tensor.to(self._device)) for name, tensor in tensors), CHUNK_BYTES):
                sending.wait_stream(packing)
                self._opened().broadcast(chunk, src=SENDER_RANK, stream=sending)
                # The chunk may be memory of the packing stream, which is free for the next once nobody has it.
                under_way.append((chunk, sending.record_event()))
                if len(under_way) == _BUFFERS:
                    under_way.popleft()[1].synchronize()
        torch.cuda.synchronize(self._device)

    def _opened(self) -> Any:
        """Return the communicator. Raise `WeightUpdateFailed` where the group was left meanwhile."""
        if self._group is None:
            raise WeightUpdateFailed(f"the NCCL group was left: {self._reason}")
        return self._group

    def _bounded(self, work: Callable[[], None], purpose: str) -> None:
        """Run `work` on a thread; abort the communicator on timeout or `give_up`.

        A rendezvous has no communicator yet: its thread ends with the store's timeout.
        """
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by the caller
                failed.append(error)

        thread = threading.Thread(target=run, name="nccl weights", daemon=True)
        deadline = time.monotonic() + self._timeout_s
        thread.start()
        while thread.is_alive() and not self._given_up.is_set() and time.monotonic() < deadline:
            thread.join(_POLL_S)
        if thread.is_alive():
            reason = self._reason or f"waited {self._timeout_s:g} s {purpose}"
            self.close(reason)
            thread.join(_ABORT_S)
            raise WeightUpdateFailed(f"the NCCL group was aborted: {reason}")
        if failed:
            self.close(str(failed[0]))
            if isinstance(failed[0], RuntimeError):  # NCCL's, CUDA's and the store's
                raise WeightUpdateFailed(f"the NCCL group broke: {failed[0]}") from failed[0]
            raise failed[0]


Channel: TypeAlias = GlooChannel | NcclChannel
"""A group with the trainer as rank 0. Unusable after its first failure."""


def _trainer_init() -> Callable[[dict[str, Any]], Any]:
    """Return vLLM's call by which a trainer joins a group, as rank 0."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
    except ImportError as error:
        raise ConfigError(f"weights over NCCL need vLLM 0.28 or later beside the trainer: {error}") from error
    return trainer_init  # type: ignore[no-any-return]
