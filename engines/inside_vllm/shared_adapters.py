"""One list of LoRA adapters for all API processes of a vLLM engine, in a folder that they share.

Each API process of vLLM has a list and a count of ids of its own, and a request to load an adapter reaches one process.
The engine behind them knows adapters by id alone: ids differ over processes, and none comes again.
"""

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

_SUFFIX = ".adapter"


def share_adapters(folder: Path) -> None:
    """Have this process keep its adapters in `folder`."""
    if getattr(OpenAIServingModels, "adapters_are_shared", False):
        return
    init = OpenAIServingModels.__init__

    def init_shared(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        folder.mkdir(mode=0o700, exist_ok=True)
        self.lora_id_counter = SharedCount(folder / "count")
        self.lora_requests = SharedAdapters(folder, self.lora_id_counter)

    OpenAIServingModels.adapters_are_shared = True
    OpenAIServingModels.__init__ = init_shared


class SharedCount:
    """A count over all processes: the size of a file, which grows with each number that is drawn.

    Sizes show each change; the times of files are too coarse for that.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @property
    def value(self) -> int:
        return os.fstat(self._file).st_size

    def inc(self, number: int = 1) -> int:
        """Raise the count and return it. Nobody else gets the same: an appending write ends at a place of its own."""
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
        self._path(name).unlink(missing_ok=True)
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
        """Return the file of an adapter, whose name may be any text that JSON can hold."""
        digest = blake2b(name.encode(errors="surrogatepass"), digest_size=16)
        return self._folder / f"{digest.hexdigest()}{_SUFFIX}"
