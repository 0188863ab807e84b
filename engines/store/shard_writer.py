"""Files of a draft, written several at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from engines.store.draft import Draft, RawTensor
from engines.store.files import THREADS


class ShardWriter:
    """A context that owns its writes. At most `THREADS` files are held in memory."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shards")
        self._writing: deque[Future[None]] = deque()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, shard: Sequence[RawTensor], written: Callable[[], None] = lambda: None) -> None:
        """Write the tensors as one file, then call `written`, in another thread.

        Waits for the oldest file when all threads are busy, and raises its `StoreFailed`.
        """
        if len(self._writing) == THREADS:
            self._writing.popleft().result()
        self._writing.append(self._pool.submit(self._write, shard, written))

    def finish(self) -> None:
        """Returns once all files are written. Raises `StoreFailed` where one failed."""
        while self._writing:
            self._writing.popleft().result()

    def _write(self, shard: Sequence[RawTensor], written: Callable[[], None]) -> None:
        self._draft.add(shard)
        written()
