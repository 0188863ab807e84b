"""Channels: a transfer group with all workers of all engines, over gloo or NCCL, until its first failure.

Waits over gloo are bounded by `timeout_s`. One over NCCL ends when another thread closes the channel.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from engines.errors import ConfigError, WeightUpdateFailed
from engines.transfer.gloo import SENDER_RANK, WeightGroup
from engines.transfer.packing import CHUNK_BYTES, NamedTensor, kept_streams, packed

_BUFFERS = 2
"""Chunks in memory at a time: one is packed while the other is broadcast."""


class NcclChannel:
    """Sends from GPU memory, as the packed sender of vLLM does, whose communicator it has."""

    def __init__(self, address: str, port: int, world_size: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(
                f"the engines receive over NCCL, but device is {str(device)!r}: set it to the trainer's GPU"
            )
        self._info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        self._device = device
        self._group: Any = None
        self._reason: str | None = None
        self._one_at_a_time = threading.Lock()
        """Of the close and the end of a rendezvous: no communicator is left open."""

    def listen(self) -> None:
        """Get ready to listen at once in `join`, which opens the listener. The import of vLLM takes seconds, in which
        engines that wait for the listener would make no token."""
        _trainer_init()

    def join(self) -> None:
        """Wait for all engines and connect. The wait is the store's of torch, also after `close`."""
        try:
            torch.cuda.set_device(self._device)
            group = _trainer_init()(self._info)
        except RuntimeError as error:
            # The frames of the error have the store, without which the engines wait no longer.
            hint = "; all its members need one release of NCCL" if "NCCL error" in str(error) else ""
            raise WeightUpdateFailed(f"the NCCL group did not form: {error}{hint}") from error.with_traceback(None)
        with self._one_at_a_time:
            self._group = group
        if self._reason is not None:
            self.close()
            raise self._left()

    def send(self, tensors: Iterator[NamedTensor]) -> None:
        """Broadcast announced tensors. Raise `WeightUpdateFailed` where the group breaks or is closed.

        Each chunk is packed beside the broadcast of the chunk before. Tensors of a run are gathered together, and may
        be of two chunks: all are gathered and packed on one stream.
        """
        if self._group is None:
            raise self._left()
        try:
            torch.cuda.set_device(self._device)
            packing, sending = kept_streams(self._device, 2)
            under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
            with torch.cuda.stream(packing):
                for chunk in packed(((name, tensor.to(self._device)) for name, tensor in tensors), CHUNK_BYTES):
                    sending.wait_stream(packing)
                    if (group := self._group) is None:
                        raise self._left()
                    group.broadcast(chunk, src=SENDER_RANK, stream=sending)
                    # The chunk may be memory of the packing stream, which is free for the next once nobody has it.
                    under_way.append((chunk, sending.record_event()))
                    if len(under_way) == _BUFFERS:
                        under_way.popleft()[1].synchronize()
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:  # NCCL's, CUDA's and the store's
            raise WeightUpdateFailed(f"the NCCL group broke: {self._reason or error}") from error

    def close(self, reason: str = "closed the group") -> None:
        """Leave the group, and end a broadcast of another thread. May be called twice."""
        with self._one_at_a_time:
            self._reason = self._reason or reason
            group, self._group = self._group, None
        if group is None:
            return
        # Aborted, not destroyed: an abort does not wait. A broken communicator raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            group.nccl.ncclCommAbort(group.comm)
        # Closes the store's socket, on which the engines wait.
        group.group.store = None
        group.group.socket = None

    def _left(self) -> WeightUpdateFailed:
        return WeightUpdateFailed(f"the NCCL group was left: {self._reason}")


Channel: TypeAlias = WeightGroup | NcclChannel
"""A group with the trainer as rank 0."""


def _trainer_init() -> Callable[[dict[str, Any]], Any]:
    """Return vLLM's call by which a trainer joins a group, as rank 0."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
    except ImportError as error:
        raise ConfigError(f"weights over NCCL need vLLM 0.28 or later beside the trainer: {error}") from error
    return trainer_init  # type: ignore[no-any-return]
