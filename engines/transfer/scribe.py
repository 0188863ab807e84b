"""The scribe of a worker: writes the tensors of an update to the store, beside their load."""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.engine import ReceiptCopy
from engines.errors import RolloutGatewayError
from engines.store.draft import Draft
from engines.store.shard_writer import ShardWriter
from engines.transfer.gpu_files import WRITERS, write_any_file
from engines.transfer.packing import NamedTensor
from engines.transfer.tensor_bytes import where_it_is

log = logging.getLogger("vllm.rollout_gateway")  # a child of vLLM's logger, whose handlers it uses

_Chunk = tuple[deque[NamedTensor], Any]
"""Tensors of an update on their GPU, or their copies in host memory, and the event of their completion, if any."""

_BUDGET_BYTES = 4 << 30
"""Host memory for tensors that wait for the disk."""
_SPARE_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}
"""Memory of a device that is kept free for the engine while tensors wait there."""


class Scribe:
    """Writes the tensors of one worker to a draft, in its own thread.

    The transfer waits for it at most `copy.wait_s` in total; a slower draft is abandoned, with the reason in it.
    """

    def __init__(self, copy: ReceiptCopy) -> None:
        self._draft = Draft(Path(copy.draft), copy.model)
        self._base = Path(copy.base) if copy.base else None
        self._expected = copy.names
        self._wait_s = copy.wait_s
        self._given_up = ""
        self._waiting: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._bytes = 0
        self._room = threading.Condition()
        self._stream: Any = None
        self._leaves_by: Any = None  # the stream that copies a chunk to the host
        self._left_on_device: int | None = None
        # Tensors in GPU memory are copied out only after `keep`: earlier copies would slow the update.
        self._may_leave = threading.Event()
        self.is_kept = False
        self._thread = threading.Thread(target=self._write, name="scribe", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def copying(self, tensors: Sequence[NamedTensor]) -> Iterator[None]:
        """Start copies; at the block's end they are safe from the receiver's next chunk."""
        self._leaves_by = None
        try:
            self._begin_copies(tensors)
        except RuntimeError as error:  # such as no host memory: the update goes on
            log.exception("this update is not copied to the store")
            self.give_up(f"the worker could not copy the received tensors: {error}")
        try:
            yield
        finally:
            if self._leaves_by is not None:
                torch.cuda.current_stream(self._leaves_by.device).wait_stream(self._leaves_by)

    def close(self) -> None:
        """Mark the end of the tensors."""
        self._waiting.put(None)

    def keep(self) -> None:
        """Write all tensors, received and still to come: the version is committed."""
        self.is_kept = True
        self._may_leave.set()

    def give_up(self, reason: str) -> None:
        """Stop, and record the reason in the draft."""
        with self._room:
            self._given_up = self._given_up or reason
            self._room.notify_all()
        self._may_leave.set()
        self._waiting.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the writer; return True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def has_room(self, num_bytes: int) -> bool:
        """Wait while the disk is behind. Return False if the draft is abandoned."""
        self._may_leave.set()
        began = time.monotonic()
        with self._room:
            self._room.wait_for(
                lambda: self._given_up or self._bytes == 0 or self._bytes + num_bytes <= _BUDGET_BYTES,
                timeout=max(0.0, self._wait_s),
            )
            fits = self._bytes == 0 or self._bytes + num_bytes <= _BUDGET_BYTES
            self._bytes += num_bytes if fits and not self._given_up else 0
        self._wait_s -= time.monotonic() - began
        if not fits:
            self.give_up("the weight store's disk was too slow (weights.store_wait_s)")
        return not self._given_up

    def keeps(self, num_bytes: int, device: torch.device) -> bool:
        """Reserve GPU memory for tensors that wait to be written; return False without room."""
        if self._left_on_device is None:
            self._left_on_device = room_on(device)  # once: torch takes 0.5 ms
        if num_bytes > self._left_on_device:
            return False
        self._left_on_device -= num_bytes
        return True

    def put(self, tensors: Iterable[NamedTensor], done: Any = None) -> None:
        """Queue tensors, complete after event `done`, for writing; each is freed when its file is written."""
        if not self._given_up:  # the writer has ended, and they may be as large as the model
            self._waiting.put((deque(tensors), done))

    def stream(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _begin_copies(self, tensors: Sequence[NamedTensor]) -> None:
        num_bytes = sum(tensor.nbytes for _, tensor in tensors)
        device = next((tensor.device for _, tensor in tensors if tensor.is_cuda), None)
        if device is not None and self.keeps(num_bytes, device):
            # Without a copy: receivers allocate new memory for each chunk.
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            self.put(tensors, done)
        elif self.has_room(num_bytes):
            if device is None:
                self.put((name, tensor.clone()) for name, tensor in tensors)
            else:
                self._copy_to_host(tensors, device)

    def _copy_to_host(self, tensors: Sequence[NamedTensor], device: torch.device) -> None:
        self._leaves_by = stream = self.stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            pinned = [
                (name, torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True))
                for name, t in tensors
            ]
            done = torch.cuda.Event()
            done.record(stream)
        self.put(pinned, done)

    def _write(self) -> None:
        try:
            with ShardWriter(self._draft, WRITERS, write_any_file) as writer:
                self._write_all(writer)
        except Exception as error:  # recorded in the draft; the update goes on
            self.give_up(str(error) if isinstance(error, RolloutGatewayError) else repr(error))
        if self._given_up:
            self._let_all_go()
            self._draft.fail(self._given_up)

    def _write_all(self, writer: ShardWriter) -> None:
        while not self._given_up and (chunk := self._waiting.get()) is not None:
            self._may_leave.wait()
            tensors, done = chunk
            if done is not None:
                done.synchronize()  # once for all: each call waits for the engine's own Python, and holds it up
            while tensors and not self._given_up:
                name, tensor = tensors.popleft()
                written = None if tensor.is_cuda else partial(self._let_go, tensor.nbytes)
                writer.add(where_it_is(name, tensor), written)
        if self._given_up:
            return
        writer.finish()
        self._draft.complete_from(self._base, self._expected)
        self._draft.finish()

    def _let_all_go(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()

    def _let_go(self, num_bytes: int) -> None:
        with self._room:
            self._bytes -= num_bytes
            self._room.notify_all()


def room_on(device: torch.device) -> int:
    """Return bytes of a device available to copies: free memory, on a GPU plus torch's unused cache, less the
    reserve."""
    if device.type == "cpu":
        import psutil  # vLLM needs it too; a relay asks for no room

        return int(psutil.virtual_memory().available - _SPARE_BYTES["cpu"])
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused - _SPARE_BYTES["cuda"])
