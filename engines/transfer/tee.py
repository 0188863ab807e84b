"""The tee of a vLLM worker: digests the tensors of an update, and as scribe copies them to the store.

The tee wraps the model's `load_weights`, so it sees the tensors of any receiver, gloo or NCCL, and gives them the
checkpoint's names.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from engines.checkpoint.names import CheckpointNames, Incoming
from engines.engine import ReceiptCopy
from engines.errors import RolloutGatewayError
from engines.store.draft import Draft
from engines.store.shard_writer import ShardWriter
from engines.transfer.gpu_files import pin_memory, write_any_file
from engines.transfer.packing import NamedTensor
from engines.transfer.tensor_bytes import digest_on_host, runs, sum_on_device, where_it_is

log = logging.getLogger("vllm.rollout_gateway")  # a child of vLLM's logger, whose handlers it uses

Load = Callable[[Iterable[NamedTensor]], Any]

_Digested = tuple[str, torch.Tensor, str]
"""Name, tensor and the store's digest; "" for tensors on a GPU."""
_Chunk = tuple[deque[_Digested], Any]
"""Tensors of an update on their GPU, or their copies in host memory, and the event of their completion, if any."""

_MASK = (1 << 64) - 1
_BUDGET_BYTES = 4 << 30
"""Host memory for tensors that wait for the disk."""
_SPARE_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}
"""Memory of a device that is kept free for the engine while tensors wait there."""


class WeightTee:
    """One update in one worker, from its start to its end."""

    def __init__(
        self,
        model: Any,
        scribe: "Scribe | None" = None,
        load: Load | None = None,
        names: CheckpointNames | None = None,
    ) -> None:
        """`load` replaces the model's `load_weights`. Tensors get the checkpoint's `names` first."""
        self._incoming = Incoming(names or CheckpointNames())
        self._model = model
        self._scribe = scribe
        self._digests: list[_Digests] = []  # of each chunk
        self._is_blind = False
        self._load: Load = load or model.load_weights
        model.load_weights = self._load_and_see

    def load_by(self, load: Load) -> None:
        """Hand tensors to `load` from now on."""
        self._load = load

    def remove(self) -> None:
        """Restore the model's `load_weights`."""
        if self._model.__dict__.get("load_weights") == self._load_and_see:
            del self._model.load_weights

    def close(self) -> dict[str, str]:
        """End; return the digest of each received tensor. The scribe's owner keeps or discards the copy."""
        self.remove()
        if self._scribe is not None:
            self._scribe.close()
        return {name: digest for chunk in self._digests for name, digest in chunk.all().items()}

    def _load_and_see(self, weights: Iterable[NamedTensor]) -> Any:
        tensors = self._incoming.converted(weights)
        try:
            if not self._is_blind:
                self._digests.append(_Digests(tensors))
        except Exception as error:  # such as no GPU memory: the update goes on
            log.exception("this update has no digests")
            self._is_blind = True
            self._digests.clear()
            if self._scribe is not None:
                self._scribe.give_up(f"the worker could not digest the received tensors: {error}")
        if self._scribe is None or self._is_blind:
            return self._load(tensors)
        # The copy to the host runs beside the load; reuse of the receiver's buffer waits for it.
        known = self._digests[-1].on_host
        with self._scribe.copying([(name, tensor, known.get(name, "")) for name, tensor in tensors]):
            return self._load(tensors)


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
        self._left_on_device: int | None = None
        # Tensors in GPU memory are copied out only after `keep`: earlier copies would slow the update.
        self._may_leave = threading.Event()
        self.is_kept = False
        self._thread = threading.Thread(target=self._write, name="scribe", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def copying(self, tensors: Sequence[_Digested]) -> Iterator[None]:
        """Start copies; at the block's end they are safe from the receiver's next chunk."""
        leaves_by = None
        try:
            leaves_by = self._begin_copies(tensors)
        except RuntimeError as error:  # such as no host memory: the update goes on
            log.exception("this update is not copied to the store")
            self.give_up(f"the worker could not copy the received tensors: {error}")
        try:
            yield
        finally:
            if leaves_by is not None:
                torch.cuda.current_stream(leaves_by.device).wait_stream(leaves_by)

    def close(self) -> None:
        """Mark the end of the tensors."""
        self._waiting.put(None)

    @classmethod
    def after(cls, before: "Scribe | None", copy: ReceiptCopy) -> "Scribe":
        """Return the next scribe, once the scribe before has ended: two would need twice the memory."""
        scribe = cls(copy)
        if before is not None and not before.join(copy.wait_s):
            scribe.give_up("the version before is still being written (weights.store_wait_s)")
        return scribe

    def drop(self) -> None:
        """Discard the draft unless it is kept."""
        if not self.is_kept:
            self.give_up("the update was aborted")

    def keep(self) -> None:
        """Finish the draft in the background, or note there why it failed: the version is committed."""
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

    def put(self, tensors: Iterable[_Digested], done: Any = None) -> None:
        """Queue tensors, complete after event `done`, for writing; each is freed when its file is written."""
        if not self._given_up:  # the writer has ended, and they may be as large as the model
            self._waiting.put((deque(tensors), done))

    def _begin_copies(self, tensors: Sequence[_Digested]) -> Any:
        """Start copies. Return the stream that copies them to the host, if any."""
        num_bytes = sum(tensor.nbytes for _, tensor, _ in tensors)
        device = next((tensor.device for _, tensor, _ in tensors if tensor.is_cuda), None)
        if device is not None and self.keeps(num_bytes, device):
            # Without a copy: receivers allocate new memory for each chunk.
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
            self.put(tensors, done)
        elif self.has_room(num_bytes):
            if device is None:
                self.put((name, t.clone(), digest) for name, t, digest in tensors)
            else:
                return self._copy_to_host(tensors, device)
        return None

    def _copy_to_host(self, tensors: Sequence[_Digested], device: torch.device) -> Any:
        self._stream = stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            pinned = [
                (name, torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True), digest)
                for name, t, digest in tensors
            ]
            done = torch.cuda.Event()
            done.record(stream)
        self.put(pinned, done)
        return stream

    def _write(self) -> None:
        try:
            with ShardWriter(self._draft, 2, write_any_file) as writer:
                self._write_all(writer)
        except Exception as error:  # recorded in the draft; the update goes on
            self.give_up(str(error) if isinstance(error, RolloutGatewayError) else repr(error))
        if self._given_up:
            self._waiting = queue.SimpleQueue()  # the tensors in the other are freed
            self._draft.fail(self._given_up)

    def _write_all(self, writer: ShardWriter) -> None:
        while not self._given_up and (chunk := self._waiting.get()) is not None:
            self._may_leave.wait()
            tensors, done = chunk
            if done is not None:
                done.synchronize()  # once for all: each call waits for the engine's own Python, and holds it up
            while tensors and not self._given_up:
                name, tensor, digest = tensors.popleft()
                written = None if tensor.is_cuda else partial(self._let_go, tensor.nbytes)
                writer.add(where_it_is(name, tensor, digest), written)
        if self._given_up:
            return
        writer.finish()
        self._draft.complete_from(self._base, self._expected)
        self._draft.finish()

    def _let_go(self, num_bytes: int) -> None:
        with self._room:
            self._bytes -= num_bytes
            self._room.notify_all()


@cache
def prepare(device: torch.device) -> None:
    """Pin memory ahead of updates."""
    if device.type == "cuda":
        try:
            pin_memory()
        except RuntimeError:  # updates then have no copy, and log it
            log.exception("no host memory can be pinned")


class _Digests:
    """Digests of one chunk's tensors: of each on the host; on a GPU, where they may still run, of each run of
    neighbours, under the name of its first."""

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        self.on_host = {name: digest_on_host(tensor) for name, tensor in tensors if not tensor.is_cuda}
        there = runs((name, tensor.contiguous()) for name, tensor in tensors if tensor.is_cuda)
        self._sums = {name: sum_on_device(content) for name, content in there}

    def all(self) -> dict[str, str]:
        """Return all digests, after a wait for the GPU."""
        if self._sums:
            torch.cuda.synchronize(next(iter(self._sums.values())).device)  # they run on the receiver's streams
        return self.on_host | {name: f"xor64:{int(total) & _MASK:016x}" for name, total in self._sums.items()}


def room_on(device: torch.device) -> int:
    """Return bytes of a device available to copies: free memory, on a GPU plus torch's unused cache, less the
    reserve."""
    if device.type == "cpu":
        import psutil  # vLLM needs it too; a relay asks for no room

        return int(psutil.virtual_memory().available - _SPARE_BYTES["cpu"])
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused - _SPARE_BYTES["cuda"])
