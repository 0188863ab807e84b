"""A draft: a version that is being written, as whole tensors or as changes to a base version."""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import save_file

from engines.batches import batches
from engines.checkpoint import Span, read_file, read_spans
from engines.errors import InvalidRequest, StoreFailed
from engines.store.changed_elements import Array, ChangedElements
from engines.store.files import check_room, disk_errors, read_at, sync, write_at
from engines.store.manifest import MANIFEST, Manifest, StoredTensor
from engines.store.tensor_file import header, write_file

SHARD_BYTES = 512 << 20
"""Size at which a file of a version is written; a writer holds at least as much memory."""
DRAFT = "draft-"
"""Prefix of draft folders."""
OWNER = ".owner"
"""A file in a draft that its writer keeps locked."""
DELTA = ".delta"
"""Suffix of files of changed elements."""

_FAILED = "failed"
_JOINED_AT_A_TIME = 4
"""Tensors whose changes are joined at a time, each held in memory."""
_INDEX = "model.safetensors.index.json"
_GAPS, _VALUES = ".gaps", ".values"


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
"""Writes a file of tensors and returns their digests. Raises `OSError` and `StoreFailed`."""


def write_host_file(path: Path, tensors: Sequence[RawTensor]) -> list[str]:
    """Write a file of tensors that are in host memory."""
    return write_file(path, tensors, (tensor.bytes for tensor in tensors))


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor as changes to the tensor with digest `base`. `digest` is its own."""

    name: str
    dtype: str
    shape: Sequence[int]
    digest: str
    base: str
    elements: ChangedElements

    @property
    def num_bytes(self) -> int:
        return self.elements.num_bytes


class Draft:
    """A version that is being written by one writer. In one `add`, the last tensor of a name counts.

    Every method raises `StoreFailed` where the disk is full or gone; the draft must be discarded then.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        tensors: Mapping[str, StoredTensor] | None = None,
        base: int | None = None,
    ) -> None:
        """`folder` is from `WeightStore.draft` or `claim_draft` and may have `tensors` already. Changes refer to
        version `base`."""
        self.folder = folder
        self._model = model
        self._tensors = dict(tensors or {})
        self._base = base
        self._lock = threading.Lock()
        self._num_files = max(
            (_number(file) for tensor in self._tensors.values() for file in (tensor.file, tensor.changes)), default=0
        )

    def add(self, tensors: Sequence[RawTensor], write: WriteFile = write_host_file) -> None:
        """Write one file of tensors, and note their digests. Threads may write a file each."""
        # Wide elements come before narrow ones, to stay aligned.
        last = sorted({tensor.name: tensor for tensor in tensors}.values(), key=RawTensor.width, reverse=True)
        path = self._next_file()
        with disk_errors(path):
            check_room(self.folder, sum(tensor.num_bytes for tensor in last))
            digests = write(path, last)
        stored = {
            tensor.name: StoredTensor(tensor.dtype, list(tensor.shape), digest, path.name)
            for tensor, digest in zip(last, digests, strict=True)
        }
        self._note(stored)

    def add_changes(self, tensors: Sequence[ChangedTensor]) -> None:
        """Write one file of changes to tensors of the base version."""
        path = self._next_file(f"changes-{{:05d}}{DELTA}")
        content = {}
        for tensor in tensors:
            content[tensor.name + _GAPS], content[tensor.name + _VALUES] = tensor.elements.gaps, tensor.elements.values
        with disk_errors(path):
            save_file(content, path)
            sync(path)
        stored = {
            tensor.name: StoredTensor(tensor.dtype, list(tensor.shape), tensor.digest, "", path.name, tensor.base)
            for tensor in tensors
        }
        self._note(stored)

    def _note(self, stored: Mapping[str, StoredTensor]) -> None:
        with self._lock:
            if repeated := stored.keys() & self._tensors.keys():
                # An engine would load both files, in any order.
                raise StoreFailed(f"tensor {min(repeated)!r} came twice in one update, in different files")
            self._tensors |= stored

    def join(self, base: Path) -> None:
        """Join the changes with the tensors of the version in folder `base`; `check_bytes` checks the digests.

        Raise `InvalidRequest` where the base has other tensors, before anything is written, or the changes are damaged
        or do not fit.
        """
        lacking = {name: tensor for name, tensor in self._tensors.items() if not tensor.file}
        held = Manifest.read(base)
        for name, tensor in lacking.items():
            found = held.tensors[name].digest if name in held.tensors else "none"
            if found != tensor.base:
                raise InvalidRequest(
                    f"tensor {name!r} comes as changes to {tensor.base}, and in version {held.version} it is {found}: "
                    "push it whole",
                    param="snapshot",
                )
        changes = {file: _Changes(self.folder / file) for file in {tensor.changes for tensor in lacking.values()}}
        for file, spans in _read_spans(base).items():
            if not (wanted := [span for span in spans if span.name in lacking]):
                continue
            path = self._next_file()
            with disk_errors(path):
                check_room(self.folder, sum(span.num_bytes for span in wanted))
                _write_joined(path, base / file, wanted, lambda name: changes[lacking[name].changes].of(name))
            self._tensors |= {span.name: replace(lacking[span.name], file=path.name) for span in wanted}

    def complete_from(self, base: Path | None, names: Iterable[str]) -> None:
        """Copy missing tensors of `names` from the checkpoint or version in folder `base`."""
        missing = set(names) - self._tensors.keys()
        if not missing:
            return
        if base is None:
            raise StoreFailed(f"tensor {min(missing)!r} was not sent, and the version before is not kept")
        kept = Manifest.read(base).tensors if (base / MANIFEST).is_file() else {}
        for file, spans in _read_spans(base).items():
            wanted = [span for span in spans if span.name in missing]
            missing -= {span.name for span in wanted}
            if not wanted or (kept and len(wanted) == len(spans) and self._link(base / file, kept)):
                continue
            for batch in batches(wanted, attrgetter("num_bytes"), SHARD_BYTES):
                self.add(_read_tensors(base / file, batch))
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
            name: replace(tensor, file=path.name, changes="", base="")
            for name, tensor in kept.items()
            if tensor.file == file.name
        }
        return True

    def _next_file(self, name: str = "model-{:05d}.safetensors") -> Path:
        with self._lock:
            self._num_files += 1
            return self.folder / name.format(self._num_files)

    def finish(self) -> None:
        """Write index and manifest, which make the draft whole."""
        with disk_errors(self.folder):
            size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
            weight_map = {name: tensor.file for name, tensor in self._tensors.items() if tensor.file}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
            sync(self.folder / _INDEX)
            Manifest(self._model, self._tensors, base=self._base).write(self.folder)

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
        fcntl.flock(owner, fcntl.LOCK_SH)  # the relay holds it too
        begun.rename(folder)
    return folder, owner


def complete(draft: Path, base: Path | None, names: Iterable[str]) -> None:
    """Copy the tensors of `names` that a finished draft lacks from the checkpoint or version in folder `base`."""
    manifest = Manifest.read(draft)
    if set(names) <= manifest.tensors.keys():
        return
    added = Draft(draft, manifest.model, manifest.tensors, manifest.base)
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


def _number(file: str) -> int:
    """Return the number in a name such as "model-00003.safetensors"; 0 where there is none."""
    number = file.partition(".")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


class _Changes:
    """The changes in one file of a draft. Read and not mapped: a writer that cuts it off would end this process.

    Raises `InvalidRequest` where the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._refused():
            self._spans = {span.name: span for span in read_file(path)}

    def of(self, name: str) -> ChangedElements:
        """Return the changes of one tensor. Threads may call this."""
        with self._refused(), self._path.open("rb") as file:
            return ChangedElements(*(_read_array(file, self._spans[name + kind]) for kind in (_GAPS, _VALUES)))

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{self._path.name} does not hold the draft's changes: {error}", param="snapshot"
            ) from error


def _read_array(file: BinaryIO, span: Span) -> Array:
    content = np.empty(span.num_bytes, np.uint8)
    read_at(file, content.data, span.begin)
    return content.view(span.dtype).reshape(span.shape)


def _read_spans(base: Path) -> dict[str, list[Span]]:
    try:
        return read_spans(base)
    except (OSError, ValueError) as error:
        raise StoreFailed(f"{base} cannot be read: {error}") from error


def _read_tensors(path: Path, spans: Sequence[Span]) -> list[RawTensor]:
    try:
        with path.open("rb") as file:
            return [_read_tensor(file, span) for span in spans]
    except (OSError, ValueError) as error:
        raise StoreFailed(f"{path} cannot be read: {error}") from error


def _read_tensor(file: BinaryIO, span: Span) -> RawTensor:
    buffer = (ctypes.c_ubyte * span.num_bytes)()
    read_at(file, memoryview(buffer).cast("B"), span.begin)
    return RawTensor(span.name, span.dtype, span.shape, ctypes.addressof(buffer), span.num_bytes, buffer)


def _write_joined(target: Path, base: Path, spans: Sequence[Span], changes: Callable[[str], ChangedElements]) -> None:
    """Write file `target` of these tensors of file `base`, each with its changes, in a thread per tensor.

    Raises `OSError`, and what `changes` and applying them raise.
    """
    spans = sorted(spans, key=lambda span: span.begin)  # wide elements stay before narrow ones, to stay aligned
    head, places = header(spans)
    with base.open("rb") as source, target.open("wb", buffering=0) as file:
        file.write(head)
        file.truncate(len(head) + sum(span.num_bytes for span in spans))

        def join(span: Span, place: int) -> None:
            content = np.empty(span.num_bytes, np.uint8)
            read_at(source, content.data, span.begin)
            changes(span.name).apply_to(content)
            write_at(file.fileno(), content.data, place)

        with ThreadPoolExecutor(_JOINED_AT_A_TIME, thread_name_prefix="join") as pool:
            for done in [pool.submit(join, span, place) for span, place in zip(spans, places, strict=True)]:
                done.result()
        os.fsync(file.fileno())
