"""Collects the tensors of a draft into files, and writes several files at a time."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engines.store.draft import SHARD_BYTES, ChangedTensor, Draft, RawTensor, WriteFile, write_host_file
from engines.store.files import THREADS

_Shard = list[tuple[RawTensor | ChangedTensor, Callable[[], None] | None]]
"""The tensors of one file, which are of one kind, each with its call once the file is written."""


class ShardWriter:
    """A context that owns its writes. At most `num_threads` full files are held in memory."""

    def __init__(self, draft: Draft, num_threads: int = THREADS, write: WriteFile = write_host_file) -> None:
        self._draft = draft
        self._write_file = write
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shards")
        self._writing: deque[Future[None]] = deque()
        self._shards: dict[type, _Shard] = {}
        self._sizes: Counter[type] = Counter()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, tensor: RawTensor | ChangedTensor, written: Callable[[], None] | None = None) -> None:
        """Write the tensor with the next file of its kind, then call `written`, in another thread.

        Waits for the oldest file when all threads are busy, and raises its `StoreFailed`.
        """
        kind = type(tensor)
        self._shards.setdefault(kind, []).append((tensor, written))
        self._sizes[kind] += tensor.num_bytes
        if self._sizes[kind] >= SHARD_BYTES:
            del self._sizes[kind]
            self._begin(self._shards.pop(kind))

    def finish(self) -> None:
        """Returns once all files are written. Raises `StoreFailed` where one failed."""
        while self._shards:
            self._begin(self._shards.popitem()[1])
        while self._writing:
            self._writing.popleft().result()

    def _begin(self, shard: _Shard) -> None:
        if len(self._writing) == self._num_threads:
            self._writing.popleft().result()
        self._writing.append(self._pool.submit(self._write, shard))

    def _write(self, shard: _Shard) -> None:
        if whole := [tensor for tensor, _ in shard if isinstance(tensor, RawTensor)]:
            self._draft.add(whole, self._write_file)
        if changed := [tensor for tensor, _ in shard if isinstance(tensor, ChangedTensor)]:
            self._draft.add_changes(changed)
        for _, written in shard:
            if written is not None:
                written()
