"""One list of LoRA adapters for all API processes of a vLLM engine, in a folder that they share.

Each API process of vLLM has a list and a count of ids of its own, and a request to load an adapter reaches one process.
The engine behind them knows adapters by id alone: ids differ over processes, and none comes again.
"""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

_POLL_S = 0.01
_SUFFIX = ".adapter"


def share_adapters(folder: Path) -> None:
    """Have this process keep its adapters in `folder`."""
    if getattr(OpenAIServingModels, "adapters_are_shared", False):
        return
    OpenAIServingModels.adapters_are_shared = True
    OpenAIServingModels.__init__ = _with_shared_lists(OpenAIServingModels.__init__, folder)
    OpenAIServingModels.init_static_loras = _each_loaded_once(OpenAIServingModels.init_static_loras)


def _with_shared_lists(init: Any, folder: Path) -> Any:
    def init_shared(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        folder.mkdir(mode=0o700, exist_ok=True)
        self.lora_id_counter = SharedCount(folder / "count")
        self.lora_requests = SharedAdapters(folder, self.lora_id_counter)
        self.lora_resolver_lock = SharedLocks(folder / "locks")

    return init_shared


def _each_loaded_once(init_static_loras: Any) -> Any:
    """Wrap the load of the adapters of the command line. All processes do it: the first one loads an adapter."""

    async def init_once(self: Any) -> None:
        modules = self.static_lora_modules
        for module in modules or ():
            self.static_lora_modules = [module]
            try:
                await init_static_loras(self)
            except ValueError:
                held = self.lora_requests.get(module.name)
                if held is None or held.lora_path != module.path:
                    raise
        self.static_lora_modules = modules

    return init_once


class SharedCount:
    """A count over all processes: the size of a file, which grows with each number that is drawn.

    Sizes show each change; the times of files are too coarse for that.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._writing = threading.Lock()

    @property
    def value(self) -> int:
        return os.fstat(self._file).st_size

    def inc(self, number: int = 1) -> int:
        """Raise the count and return it. Nobody else gets the same: an appending write ends at a place of its own."""
        with self._writing:
            os.write(self._file, bytes(number))
            return os.lseek(self._file, 0, os.SEEK_CUR)


class SharedAdapters(MutableMapping[str, LoRARequest]):
    """The adapters by name: a file for each in a folder, which is read again when `count` has changed.

    `in`, `get` and iteration see each change that another process has finished. `[]` finds the adapters of the last of
    these, since vLLM takes an adapter after it has asked for it with `in`, and it may be unloaded in between.
    """

    def __init__(self, folder: Path, count: SharedCount) -> None:
        self._folder = folder
        self._count = count
        self._known: dict[str, LoRARequest] = {}
        self._known_at = -1

    def __contains__(self, name: object) -> bool:
        return name in self._current()

    def __getitem__(self, name: str) -> LoRARequest:
        return self._known[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._current().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def __setitem__(self, name: str, adapter: LoRARequest) -> None:
        path = self._path(name)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(adapter))
        written.replace(path)
        self._count.inc()

    def __delitem__(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise KeyError(name) from None
        self._count.inc()

    def _current(self) -> dict[str, LoRARequest]:
        # Files change before the count does: a change under this read is read again.
        if (count := self._count.value) != self._known_at:
            self._known, self._known_at = self._read(), count
        return self._known

    def _read(self) -> dict[str, LoRARequest]:
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # unloaded in this moment
                found.append(msgspec.json.decode(path.read_bytes(), type=LoRARequest))
        return {adapter.lora_name: adapter for adapter in sorted(found, key=lambda adapter: adapter.lora_int_id)}

    def _path(self, name: str) -> Path:
        return self._folder / f"{_digest(name, 16).hex()}{_SUFFIX}"


class SharedLocks:
    """A lock for each name over all processes, held by `async with locks[name]`.

    The kernel frees those of a process that ends.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._here: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __getitem__(self, name: str) -> AbstractAsyncContextManager[None]:
        return self._hold(name)

    @contextlib.asynccontextmanager
    async def _hold(self, name: str) -> AsyncIterator[None]:
        # The lock of a byte of the file, which need not be there. A process never waits for its own.
        place = int.from_bytes(_digest(name, 7))
        async with self._here[name]:
            while not self._is_locked(place):  # noqa: ASYNC110, other processes set no event here
                await asyncio.sleep(_POLL_S)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _is_locked(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True


def _digest(name: str, size: int) -> bytes:
    """Return a digest of any name that JSON can hold: a client may name any model."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=size).digest()
