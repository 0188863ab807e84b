"""Collects the tensors of a draft into files, and writes several files at a time."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engines.store.draft import SHARD_BYTES, Draft, RawTensor, WriteFile, write_host_file
from engines.store.files import THREADS

_Shard = list[tuple[RawTensor, Callable[[], None] | None]]
"""The tensors of one file, each with its call once the file is written."""


class ShardWriter:
    """A context that owns its writes. At most `num_threads` full files are held in memory."""

    def __init__(self, draft: Draft, num_threads: int = THREADS, write: WriteFile = write_host_file) -> None:
        self._draft = draft
        self._write_file = write
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shards")
        self._writing: deque[Future[None]] = deque()
        self._shard: _Shard = []
        self._size = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, tensor: RawTensor, written: Callable[[], None] | None = None) -> None:
        """Write the tensor with the next file, then call `written`, in another thread.

        Waits for the oldest file when all threads are busy, and raises its `StoreFailed`.
        """
        self._shard.append((tensor, written))
        self._size += tensor.num_bytes
        if self._size >= SHARD_BYTES:
            self._begin()

    def finish(self) -> None:
        """Returns once all files are written. Raises `StoreFailed` where one failed."""
        if self._shard:
            self._begin()
        while self._writing:
            self._writing.popleft().result()

    def _begin(self) -> None:
        shard, self._shard, self._size = self._shard, [], 0
        if len(self._writing) == self._num_threads:
            self._writing.popleft().result()
        self._writing.append(self._pool.submit(self._write, shard))

    def _write(self, shard: _Shard) -> None:
        self._draft.add([tensor for tensor, _ in shard], self._write_file)
        for _, written in shard:
            if written is not None:
                written()
