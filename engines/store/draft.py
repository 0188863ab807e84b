"""A draft: a version that is being written."""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from engines.batches import batches
from engines.checkpoint.folder import Span, read_spans, written_dtype
from engines.errors import StoreFailed
from engines.store.files import disk_errors, read_at, sync
from engines.store.manifest import MANIFEST, Manifest, StoredTensor, digest_of

SHARD_BYTES = 512 << 20
"""Size at which a file of a version is written; a writer holds at least as much memory."""
DRAFT = "draft-"
"""Prefix of draft folders."""
OWNER = ".owner"
"""A file in a draft that its writer keeps locked."""

_FAILED = "failed"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's contiguous bytes in host memory at `address`, kept alive by `owner`. `digest` may be unknown."""

    name: str
    dtype: str
    shape: Sequence[int]
    address: int
    num_bytes: int
    owner: Any
    digest: str = ""

    @property
    def bytes(self) -> memoryview:
        array = (ctypes.c_ubyte * self.num_bytes).from_address(self.address)
        # The bytes may outlive this, as in `raw_tensor(...).bytes`.
        array.owner = self.owner  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

    def width(self) -> int:
        """Bytes of an element."""
        return self.num_bytes // max(1, math.prod(self.shape))


WriteFile = Callable[[Path, Sequence[RawTensor]], list[str]]
"""Writes a file of tensors and returns their digests, "" for unknown ones. Raises `OSError` and `StoreFailed`."""


def write_host_file(path: Path, tensors: Sequence[RawTensor]) -> list[str]:
    """Write a file of tensors that are in host memory."""
    write_file(path, tensors, (tensor.bytes for tensor in tensors))
    return [tensor.digest or digest_of(tensor.bytes) for tensor in tensors]


def write_file(path: Path, tensors: Sequence[RawTensor], pieces: Iterable[memoryview]) -> None:
    """Write a file. `pieces` are the tensors' bytes in order, cut anywhere: no copy of the whole file is in memory.

    Raises `OSError`, and what `pieces` raises.
    """
    with path.open("wb", buffering=0) as file:
        for piece in chain([memoryview(_header(tensors))], pieces):
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())


def _header(tensors: Sequence[RawTensor]) -> bytes:
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, end in zip(tensors, accumulate(one.num_bytes for one in tensors), strict=True):
        tree[tensor.name] = {
            "dtype": written_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.num_bytes, end],
        }
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Draft:
    """A version that is being written by one writer. In one `add`, the last tensor of a name counts.

    Every method raises `StoreFailed` where the disk is full or gone; the draft must be discarded then.
    """

    def __init__(self, folder: Path, model: str, tensors: Mapping[str, StoredTensor] | None = None) -> None:
        """`folder` is from `WeightStore.draft` or `claim_draft` and may have `tensors` already."""
        self.folder = folder
        self._model = model
        self._tensors = dict(tensors or {})
        self._lock = threading.Lock()
        self._num_files = len({tensor.file for tensor in self._tensors.values()})  # named by their numbers

    def add(self, tensors: Sequence[RawTensor], write: WriteFile = write_host_file) -> None:
        """Write one file of tensors, and note their digests. Threads may write a file each."""
        # Wide elements come before narrow ones, to stay aligned.
        last = sorted({tensor.name: tensor for tensor in tensors}.values(), key=RawTensor.width, reverse=True)
        path = self._next_file()
        with disk_errors(path):
            try:
                digests = write(path, last)
            except OSError:
                path.unlink(missing_ok=True)  # a full disk has room for the reason then
                raise
        stored = {
            tensor.name: StoredTensor(tensor.dtype, list(tensor.shape), digest, path.name)
            for tensor, digest in zip(last, digests, strict=True)
        }
        with self._lock:
            if repeated := stored.keys() & self._tensors.keys():
                # An engine would load both files, in any order.
                raise StoreFailed(f"tensor {min(repeated)!r} came twice in one update, in different files")
            self._tensors |= stored

    def complete_from(self, base: Path | None, names: Iterable[str]) -> None:
        """Copy missing tensors of `names` from the checkpoint or version in folder `base`."""
        missing = set(names) - self._tensors.keys()
        if not missing:
            return
        if base is None:
            raise StoreFailed(f"tensor {min(missing)!r} was not sent, and the version before is not kept")
        kept = Manifest.read(base).tensors if (base / MANIFEST).is_file() else {}
        try:
            for file, spans in read_spans(base).items():
                wanted = [span for span in spans if span.name in missing]
                missing -= {span.name for span in wanted}
                if not wanted or (kept and len(wanted) == len(spans) and self._link(base / file, kept)):
                    continue
                with (base / file).open("rb") as source:
                    for batch in batches(wanted, attrgetter("num_bytes"), SHARD_BYTES):
                        self.add([_read_tensor(source, span) for span in batch])
        except (OSError, ValueError) as error:
            raise StoreFailed(f"{base} cannot be read: {error}") from error
        if missing:
            raise StoreFailed(f"{base} lacks tensor {min(missing)!r}, which was not sent either")

    def _link(self, file: Path, kept: Mapping[str, StoredTensor]) -> bool:
        """Hard-link a file of a version. Return False where the file system cannot."""
        path = self._next_file()
        try:
            os.link(file, path)
        except OSError:
            self._num_files -= 1
            return False
        self._tensors |= {
            name: replace(tensor, file=path.name) for name, tensor in kept.items() if tensor.file == file.name
        }
        return True

    def _next_file(self) -> Path:
        with self._lock:
            self._num_files += 1
            return self.folder / f"model-{self._num_files:05d}.safetensors"

    def finish(self) -> None:
        """Write index and manifest, which make the draft whole."""
        with disk_errors(self.folder):
            size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
            weight_map = {name: tensor.file for name, tensor in self._tensors.items()}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
            sync(self.folder / _INDEX)
            Manifest(self._model, self._tensors).write(self.folder)

    def fail(self, reason: str) -> None:
        """Write the reason why the draft will not become whole, for the gateway that waits for it."""
        # Where the disk or the folder is gone, the wait ends without this.
        with contextlib.suppress(OSError):
            (self.folder / _FAILED).write_text(reason, encoding="utf-8")


def claim_draft(store: Path) -> tuple[Path, int]:
    """Return a new draft folder, and a descriptor whose lock marks its writer as alive until it is closed."""
    folder = store / f"{DRAFT}{uuid.uuid4().hex}"
    begun = store / f".{folder.name}"  # `sweep` must not see a draft before it is locked
    with disk_errors(folder):
        begun.mkdir(mode=0o700)
        owner = os.open(begun / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(owner, fcntl.LOCK_EX)
        begun.rename(folder)
    return folder, owner


def complete(draft: Path, base: Path | None, names: Iterable[str]) -> None:
    """Copy the tensors of `names` that a finished draft lacks from the checkpoint or version in folder `base`."""
    manifest = Manifest.read(draft)
    if set(names) <= manifest.tensors.keys():
        return
    added = Draft(draft, manifest.model, manifest.tensors)
    added.complete_from(base, names)
    added.finish()


def is_whole(draft: Path) -> bool:
    """Return True where the writer has finished the draft. Raise `StoreFailed` where it failed or the draft is gone."""
    if (draft / _FAILED).is_file():
        raise StoreFailed((draft / _FAILED).read_text(encoding="utf-8"))
    if not draft.is_dir():
        raise StoreFailed(f"{draft} is gone")
    return (draft / MANIFEST).is_file()


def raw(name: str, dtype: str, shape: Sequence[int], content: bytes | bytearray | memoryview) -> RawTensor:
    """Return a tensor with a copy of these bytes."""
    buffer = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)
    return RawTensor(name, dtype, shape, ctypes.addressof(buffer), len(content), buffer)


def _read_tensor(file: BinaryIO, span: Span) -> RawTensor:
    buffer = (ctypes.c_ubyte * span.num_bytes)()
    read_at(file, memoryview(buffer).cast("B"), span.begin)
    return RawTensor(span.name, span.dtype, span.shape, ctypes.addressof(buffer), span.num_bytes, buffer)
