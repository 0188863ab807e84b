"""Fetches and reads a weight version while the engine makes tokens, so that the load itself is short."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

import torch

from engines.checkpoint import FileStates, file_states, read_spans
from engines.loading.exchange import Exchange
from engines.loading.snapshot_reader import read_tensors
from engines.transfer.packing import NamedTensor
from engines.transfer.tee import room_on

NamedTensors = list[NamedTensor]

_reading = threading.Lock()
"""Held from the look at free memory to the end of the read, so that a read that was dropped is not counted as room."""


class Prefetch:
    """The prefetch of folder `path` on a thread, for which `take` waits.

    It calls `fetch`, if given, then reads the folder into free memory of the worker's GPU, if there is enough.
    """

    def __init__(self, path: Path, device: torch.device, fetch: Callable[[], object] | None = None) -> None:
        self._path = path
        self._device = device
        self._fetch = fetch
        self._files: FileStates = ()
        self._tensors: NamedTensors | None = None
        self._is_dropped = False
        self.exchange: Exchange | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def is_of(self, path: Path) -> bool:
        """Return True if it is of `path` with its present files: a withdrawn version's number is reused."""
        return path == self._path and (self._thread.is_alive() or self._files == _states(path))

    @property
    def is_ready(self) -> bool:
        """True once the prefetch has ended. Raises its error."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def plan(self, exchange: Callable[[NamedTensors], Exchange | None]) -> None:
        """Plan the load of the tensors that were read in exchange for the weights, if there is such a load, before the
        engine stops for it."""
        if self._tensors is not None:
            self.exchange = exchange(self._tensors)

    def take(self, path: Path) -> NamedTensors | None:
        """Return the folder's tensors on the GPU, for its current stream, once; None if the caller has to read them.

        Wait for the prefetch if it is of this folder, and not for another folder's.
        """
        if path != self._path:
            return None
        self._thread.join()
        tensors, self._tensors = self._tensors, None
        if not self.is_of(path):
            return None
        for _, tensor in tensors or ():
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensors

    def drop(self) -> None:
        """End the read, and free its tensors."""
        self._is_dropped = True
        self._tensors = self.exchange = None

    def _run(self) -> None:
        try:
            if self._fetch is not None:
                self._fetch()
            self._files = file_states(self._path)
            if self._device.type == "cuda":
                self._read_where_there_is_room()
        except Exception as error:  # `is_ready` raises it, and the load reads the folder itself
            self._error = error.with_traceback(None)  # whose frames hold tensors

    def _read_where_there_is_room(self) -> None:
        with _reading:
            if not self._is_dropped and self._num_bytes() <= room_on(self._device):
                self._tensors = self._read()
        if self._is_dropped:
            self._tensors = None

    def _num_bytes(self) -> int:
        return sum(span.num_bytes for spans in read_spans(self._path).values() for span in spans)

    def _read(self) -> NamedTensors:
        stream = copy_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            tensors = list(takewhile(lambda _: not self._is_dropped, read_tensors(self._path, self._device)))
        stream.synchronize()
        return tensors


def _states(path: Path) -> FileStates | None:
    """Return the states of a folder's files; None where they are being replaced or removed."""
    with suppress(OSError, ValueError):
        return file_states(path)
    return None


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies: the engine's own stream would make copies and steps wait for each other.

    It is always the same stream, since torch keeps freed memory for the stream that used it, and would allocate more
    for each version.
    """
    return torch.cuda.Stream(device)
