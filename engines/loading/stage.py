"""Tensors of a version in free memory beside the weights, so that the engine makes tokens until their load."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from engines.checkpoint.folder import read_spans
from engines.errors import WeightUpdateFailed
from engines.loading.snapshot_reader import read_tensors
from engines.transfer.packing import NamedTensor, kept_streams, num_bytes
from engines.transfer.tee import room_on

_SHORT_TURN_S = 0.0002
_reading = threading.Lock()
"""Held from the check of free memory to the end of a read, so that a read that was dropped is not counted as room."""


class Stage:
    """Tensors that wait in one worker. A thread brings them, as a call in the worker stops the engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[NamedTensor] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_dropped = False

    @property
    def is_ready(self) -> bool:
        """True once all tensors are here that were asked for. Raises the error of their thread."""
        if self._is_running:
            return False
        if self._error is not None:
            raise self._error
        return True

    def add(self, tensors: Iterable[NamedTensor]) -> None:
        """Keep tensors without a copy: receivers allocate new memory for each chunk."""
        if not self._is_dropped:
            self._tensors.extend(tensors)

    def take(self) -> list[NamedTensor]:
        """Return the tensors, which are no longer kept here."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def drop(self) -> None:
        """Free the tensors, and bring no more."""
        self._is_dropped = True
        self._tensors = []

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _begin(self, bring: Callable[[], None]) -> None:
        def run() -> None:
            try:
                bring()
            except Exception as error:  # `is_ready` raises it
                self._error = error.with_traceback(None)  # whose frames hold tensors

        self._thread = threading.Thread(target=run, name="stage", daemon=True)
        self._thread.start()

    def _beside_steps(self) -> AbstractContextManager[object]:
        """Return a context for the thread, whose stream is not the engine's: its steps and copies would wait for each
        other."""
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        context: AbstractContextManager[object] = torch.cuda.stream(copy_stream(self._device))
        return context


class ReceivedStage(Stage):
    """The tensors of a trainer's update, which `add` gets from their receiver."""

    def __init__(self, device: torch.device, leave: Callable[[], None]) -> None:
        """`leave` ends a receive that waits for its trainer, in another thread than its own."""
        super().__init__(device)
        self._leave = leave

    def receive(self, update_info: dict[str, Any], receive: Callable[[dict[str, Any]], object]) -> None:
        """Begin to receive the announced tensors. Those that would leave the engine too little memory are refused."""
        size, room = _num_bytes(update_info), room_on(self._device)
        if size > room:
            self._error = WeightUpdateFailed(
                f"{size} more bytes were announced, and beside the weights and what was received {max(0, room)} are "
                f"free on {self._device}: send the checkpoint's dtype, or set weights.stage: never"
            )
            return

        def bring() -> None:
            with self._beside_steps(), _short_turns():
                receive(update_info)

        self._begin(bring)

    def drop(self) -> None:
        super().drop()
        if self._is_running:
            self._leave()


class FolderStage(Stage):
    """The tensors of a folder, where they fit into free memory of a GPU."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(device)
        self._folder = folder
        self._begin(self._bring)

    def is_of(self, folder: Path) -> bool:
        """Return True if it is of `folder`: no two versions have a folder of one name."""
        return folder == self._folder

    def holds(self, folder: Path) -> bool:
        """Return True where the tensors of a folder are here, after a wait for the rest of them."""
        if not self.is_of(folder) or self._thread is None:
            return False
        self._thread.join()
        return bool(self._tensors) and self._error is None

    def _bring(self) -> None:
        if self._device.type != "cuda":
            return
        with _reading:
            if not self._is_dropped and self._num_bytes() <= room_on(self._device):
                self._read()

    def _num_bytes(self) -> int:
        return sum(span.num_bytes for spans in read_spans(self._folder).values() for span in spans)

    def _read(self) -> None:
        with self._beside_steps():
            for named in read_tensors(self._folder, self._device):
                if self._is_dropped:
                    return
                self.add([named])
        copy_stream(self._device).synchronize()


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


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's stages."""
    return kept_streams(device, 1)[0]
