"""Received tensors of an update in free memory beside the weights, so that the engine makes tokens meanwhile."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

from engines.errors import WeightUpdateFailed
from engines.loading.exchange import Exchange
from engines.loading.prefetch import copy_stream
from engines.transfer.packing import NamedTensor, num_bytes
from engines.transfer.tee import room_on

T = TypeVar("T")

_SHORT_TURN_S = 0.0002


class Stage:
    """The tensors of one update in one worker. A thread receives them, as a call in the worker stops the engine."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        """`engine` is vLLM's weight transfer engine, whose model's `load_weights` must lead to `add`."""
        self._engine = engine
        self._device = device
        self._tensors: list[NamedTensor] = []
        self.exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_dropped = False

    def add(self, tensors: Iterable[NamedTensor]) -> None:
        """Keep received tensors without a copy: receivers allocate new memory for each chunk."""
        if not self._is_dropped:
            self._tensors.extend(tensors)

    def receive(self, update_info: dict[str, Any]) -> None:
        """Begin to receive the announced tensors. Those that would leave the engine too little memory are refused."""
        size, room = _num_bytes(update_info), room_on(self._device)
        if size > room:
            self._error = WeightUpdateFailed(
                f"{size} more bytes were announced, and beside the weights and what was received {max(0, room)} are "
                f"free on {self._device}: send the checkpoint's dtype, or set weights.stage: never"
            )
            return
        self._thread = threading.Thread(target=self._receive, args=(update_info,), name="stage", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """True once the announced tensors are here. Raises the receiver's error."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def plan(self, exchange: Callable[[list[NamedTensor]], Exchange | None]) -> None:
        """Plan the load of all tensors in exchange for the weights, if there is such a load, before the engine stops
        for it."""
        self.exchange = exchange(self._tensors)

    def load_by(self, load: Callable[[list[NamedTensor]], T]) -> T:
        """Hand all tensors to a loader, and return its result once its copies have ended. They are freed, unless the
        result keeps them."""
        tensors, self._tensors = self._tensors, []
        synchronize(self._device)  # a step, a digest or a copy for the store may still read them
        loaded = load(tensors)
        synchronize(self._device)
        return loaded

    def drop(self) -> None:
        """Free the tensors, and break the group under a receive that still waits for its trainer."""
        self._is_dropped = True
        self._tensors, self.exchange = [], None
        if self._thread is not None and self._thread.is_alive():
            _break_group(self._engine)

    def _receive(self, update_info: dict[str, Any]) -> None:
        try:
            with self._on_device(), _short_turns():
                self._engine.update_weights(update_info)
        except Exception as error:  # `is_ready` raises it
            self._error = error.with_traceback(None)  # whose frames hold tensors

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context whose stream is not the engine's: a broadcast that waits would hold its steps up."""
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        context: AbstractContextManager[object] = torch.cuda.stream(copy_stream(self._device))
        return context


@contextmanager
def _short_turns() -> Iterator[None]:
    """Have Python's threads take turns more often. A receiver waits for its turn after each call to CUDA, up to 5 ms by
    default while the engine's thread prepares a step, and the trainer waits for the receiver."""
    before = sys.getswitchinterval()
    if before <= _SHORT_TURN_S:  # SGLang's are, and those beside a receive that breaks off are its to end
        yield
        return
    sys.setswitchinterval(_SHORT_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _num_bytes(update_info: dict[str, Any]) -> int:
    announced = zip(update_info.get("dtype_names") or (), update_info.get("shapes") or (), strict=False)
    return sum(num_bytes(("", getattr(torch, dtype), shape)) for dtype, shape in announced)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _break_group(engine: Any) -> None:
    """End a collective in another thread. NCCL's can only be aborted; vLLM before 0.27 just forgets its group."""
    group = getattr(engine, "model_update_group", None)
    if group is None:
        engine.shutdown()
        return
    engine.model_update_group = None
    with suppress(RuntimeError):  # of a communicator that is broken already
        group.nccl.ncclCommAbort(group.comm)
