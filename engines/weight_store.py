"""Weight versions in a folder: whole, with a digest of every tensor, renamed into place.

    v3/              version 3: safetensors under checkpoint names, manifest.json, and config and tokenizer files linked
    v4/              from the served checkpoint, so that engines load it as any checkpoint folder
    draft-1f2e.../   being written; whole once it holds manifest.json. `.owner` is locked as long as its writer lives
      *.delta        changed elements of tensors of the version that it names as its base: joined with that before it is
                     promoted, so that a version is whole, and kept for machines that hold the base and fetch this one
    .gateway         locked by the gateway that keeps the store

Any file system will do; in /dev/shm a version is written and read at the speed of memory. No engine and no torch is
needed here: gateway, engines' workers and trainers all use this file.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import xxhash
from safetensors.numpy import save_file

from engines.changed_elements import ChangedElements
from engines.checkpoint import WEIGHT_FILES, Span, read_spans
from engines.errors import InvalidRequest, StoreFailed
from engines.joined_file import write_joined

MANIFEST = "manifest.json"
SHARD_BYTES = 512 << 20
"""A file of a version is written once its tensors reach this: so much memory a writer holds, at the least."""

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Files that are read or written at a time: one core moves some GB/s between a file in memory and its own."""

_FORMAT = 1
_FAILED = "failed"
_DRAFT = "draft-"
_OWNER = ".owner"
_KEEPER = ".gateway"
HELD_BY = "held_by"
_HOLDERS = ".holders.json"
_HOLDERS_NOTED = 1000
_INDEX = "model.safetensors.index.json"
DELTA = ".delta"
_GAPS, _VALUES = ".gaps", ".values"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a version. `dtype` as torch names it ("bfloat16"); `file` is the safetensors file that holds it.

    `changes` is the file of its elements that differ from those of the tensor with digest `base`; both are empty where
    there is none. In a draft `file` is empty where nothing else is there yet.
    """

    dtype: str
    shape: list[int]
    digest: str
    file: str = ""
    changes: str = ""
    base: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version consists of. `version` is None in a draft, which has no number yet; `base` is the version that
    changes are of, if there are any."""

    model: str
    tensors: dict[str, StoredTensor]
    version: int | None = None
    base: int | None = None

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `StoreFailed` where the folder holds none that we understand."""
        path = folder / MANIFEST
        try:
            tree = json.loads(path.read_bytes())
            tensors = {name: StoredTensor(**entry) for name, entry in tree["tensors"].items()}
            if tree["format"] != _FORMAT:
                raise ValueError(f"format {tree['format']!r}, this is format {_FORMAT}")
            return cls(tree["model"], tensors, tree["version"], tree.get("base"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreFailed(f"{path} is no manifest of a weight version: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Readers see the whole manifest or none."""
        tree = {
            "format": _FORMAT,
            "version": self.version,
            "base": self.base,
            "model": self.model,
            "tensors": {name: _told(tensor) for name, tensor in self.tensors.items()},
        }
        whole = folder / f"{MANIFEST}.new"
        whole.write_text(json.dumps(tree, indent=1), encoding="utf-8")
        _sync(whole)
        whole.rename(folder / MANIFEST)
        _sync(folder)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes, contiguous and in host memory at `address`, where `owner` keeps them. `digest` if known."""

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
        return memoryview(array).cast("B")


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor of which only some elements differ from those of the one with digest `base`. `digest` is its own."""

    name: str
    dtype: str
    shape: Sequence[int]
    digest: str
    base: str
    elements: ChangedElements


def digest_of(content: Any) -> str:
    """Digest of a tensor's bytes. xxh3_128 reads 14 GB/s on one core where blake2b reads 0.3, and guards against
    damage, not against forgers: whoever can write into the store can write a manifest."""
    return f"xxh3_128:{xxhash.xxh3_128(content).hexdigest()}"


class Draft:
    """A version that is being written, by one writer. A name that comes twice counts as it came last.

    Every method raises `StoreFailed` where the disk is full or gone; the draft is worth nothing then.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        tensors: Mapping[str, StoredTensor] | None = None,
        base: int | None = None,
    ) -> None:
        """In a folder that `WeightStore.draft` or `claim_draft` has made, with `tensors` already. `base` is the version
        that changes are of."""
        self.folder = folder
        self._model = model
        self._tensors = dict(tensors or {})
        self._base = base
        self._lock = threading.Lock()
        self._num_files = max(
            (_number(file) for tensor in self._tensors.values() for file in _files_of(tensor)), default=0
        )

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def add(self, tensors: Sequence[RawTensor]) -> None:
        """Write one file of tensors and note their digests. Several threads may, a file each."""
        last = {tensor.name: tensor for tensor in tensors}
        size = sum(tensor.num_bytes for tensor in last.values())
        with self._lock:
            path = self._next_file()
        with disk_errors(path):
            _check_room(self.folder, size)
            specs = {
                tensor.name: safetensors.TensorSpec(
                    dtype=tensor.dtype, shape=tensor.shape, data_ptr=tensor.address, data_len=tensor.num_bytes
                )
                for tensor in last.values()
            }
            safetensors.serialize_file(specs, path, {"format": "pt"})
            _sync(path)
        stored = {
            name: StoredTensor(one.dtype, list(one.shape), one.digest or digest_of(one.bytes), path.name)
            for name, one in last.items()
        }
        with self._lock:
            self._note(stored)

    def add_changes(self, tensors: Sequence[ChangedTensor]) -> None:
        """Write one file of tensors that differ in some elements from those of the draft's base."""
        with self._lock:
            path = self._next_file(f"changes-{{:05d}}{DELTA}")
        content = {}
        for tensor in tensors:
            content[tensor.name + _GAPS], content[tensor.name + _VALUES] = tensor.elements.gaps, tensor.elements.values
        with disk_errors(path):
            save_file(content, path)
            _sync(path)
        stored = {
            one.name: StoredTensor(one.dtype, list(one.shape), one.digest, "", path.name, one.base) for one in tensors
        }
        with self._lock:
            self._note(stored)

    def _note(self, stored: Mapping[str, StoredTensor]) -> None:
        if again := stored.keys() & self._tensors.keys():
            # An engine would load both of them, in whatever order.
            raise StoreFailed(f"tensor {min(again)!r} came twice in one update, in different files")
        self._tensors |= stored

    def join(self, base: Path) -> None:
        """Make the tensors whole that are here as changes to those of the version in folder `base`.

        Their digests are left to `check_bytes`. Raises `InvalidRequest` before anything is written where the version
        has others, and where the changes cannot be of them.
        """
        lacking = {name: tensor for name, tensor in self._tensors.items() if not tensor.file}
        held = Manifest.read(base)
        for name, tensor in lacking.items():
            there = held.tensors[name].digest if name in held.tensors else "none"
            if there != tensor.base:
                raise InvalidRequest(
                    f"tensor {name!r} comes as changes to {tensor.base}, and in version {held.version} it is {there}: "
                    "push it whole",
                    param="snapshot",
                )
        for file, spans in read_spans(base).items():
            if not (wanted := [span for span in spans if span.name in lacking]):
                continue
            path = self._next_file()
            with disk_errors(path):
                _check_room(self.folder, sum(span.end - span.begin for span in wanted))
                write_joined(
                    path, base / file, wanted, lambda name: _read_changes(self.folder / lacking[name].changes, name)
                )
            self._tensors |= {span.name: replace(lacking[span.name], file=path.name) for span in wanted}

    def complete_from(self, base: Path | None, names: Iterable[str]) -> None:
        """Take what of `names` never came from the checkpoint or version in folder `base`: it has not changed."""
        missing = set(names) - self.names
        if not missing:
            return
        if base is None:
            raise StoreFailed(f"tensor {min(missing)!r} never came, and the version before is not kept")
        kept = Manifest.read(base).tensors if (base / MANIFEST).is_file() else {}
        for file, spans in read_spans(base).items():
            wanted = [span for span in spans if span.name in missing]
            missing -= {span.name for span in wanted}
            if not wanted or (kept and len(wanted) == len(spans) and self._link(base / file, kept)):
                continue
            with _mapped(base / file) as content:
                for batch in _batches(wanted):
                    self.add(
                        [_copied(content, span.name, span.dtype, span.shape, span.begin, span.end) for span in batch]
                    )
        if missing:
            raise StoreFailed(f"{base} lacks tensor {min(missing)!r}, which never came either")

    def _link(self, file: Path, kept: Mapping[str, StoredTensor]) -> bool:
        """Take a file of a version as it is: the same bytes under another name. False where the disk cannot."""
        path = self._next_file()
        try:
            os.link(file, path)
        except OSError:
            self._num_files -= 1
            return False
        self._tensors |= {
            name: replace(one, file=path.name, changes="", base="")
            for name, one in kept.items()
            if one.file == file.name
        }
        return True

    def _next_file(self, name: str = "model-{:05d}.safetensors") -> Path:
        self._num_files += 1
        return self.folder / name.format(self._num_files)

    def finish(self) -> None:
        """Write index and manifest: from here on the draft is whole."""
        with disk_errors(self.folder):
            size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
            weight_map = {name: tensor.file for name, tensor in self._tensors.items() if tensor.file}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
            Manifest(self._model, self._tensors, base=self._base).write(self.folder)

    def fail(self, reason: str) -> None:
        """Say in the draft why it will not become whole, to whoever waits for it."""
        # Where the disk is gone, or the folder with whoever asked for it, the wait ends by itself.
        with contextlib.suppress(OSError):
            (self.folder / _FAILED).write_text(reason, encoding="utf-8")


class WeightStore:
    """The store of one gateway. Blocking: not for an event loop.

    Only versions that this run made are known: those in the folder from the run before count for nothing, unless a
    living engine says that it holds one (`adopt`).
    """

    def __init__(self, folder: Path) -> None:
        """Open or make the folder and remove what dead writers left.

        Raises `StoreFailed` where that cannot be, or another gateway keeps it.
        """
        self.folder = folder
        self._known: set[int] = set()
        self._owned: dict[Path, int] = {}
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_ours()
            self._lock = os.open(folder / _KEEPER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(self._lock):
            os.close(self._lock)
            raise StoreFailed(
                f"{folder} is kept by another gateway: give this one a folder of its own in weights.store"
            )
        self.sweep()

    @property
    def versions(self) -> list[int]:
        """Those that can be loaded."""
        return sorted(self._known)

    def has(self, version: int) -> bool:
        return version in self._known

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def close(self) -> None:
        for draft in list(self._owned):
            self.discard(draft)
        os.close(self._lock)

    def sweep(self) -> None:
        """Remove drafts whose writers are dead."""
        for draft in self.folder.glob(f"{_DRAFT}*"):
            if draft not in self._owned and (owner := _claimed(draft)) is not None:
                shutil.rmtree(draft, ignore_errors=True)
                os.close(owner)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether so much fits, counting what our versions take, which new ones take the place of."""
        files = [path.stat() for path in self.folder.glob("*/*.safetensors")]
        ours = sum({file.st_ino: file.st_size for file in files}.values())  # versions share what has not changed
        return shutil.disk_usage(self.folder).free + ours >= num_bytes

    def draft(self) -> Path:
        """A folder for a new version, ours until promoted or discarded."""
        folder, owner = claim_draft(self.folder)
        self._owned[folder] = owner
        return folder

    def named(self, name: str) -> Path:
        """The draft of this name that another process wrote. Raises `InvalidRequest` for anything else."""
        path = self.folder / name
        is_draft = name.startswith(_DRAFT) and Path(name).name == name and not path.is_symlink()
        if not (is_draft and (path / MANIFEST).is_file()):
            raise InvalidRequest(
                f"snapshot = {name!r} is no finished draft in {self.folder}: write it there with WeightSender, and "
                "give the name of its folder alone",
                param="snapshot",
            )
        return path

    def discard(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        if (owner := self._owned.pop(draft, None)) is not None:
            os.close(owner)

    def promote(self, draft: Path, version: int, checkpoint: Path | None) -> Path:
        """Make a whole draft version `version`; a version of that number from before is replaced.

        What else engines read in a checkpoint folder is linked from `checkpoint`. Returns the version's folder.
        """
        manifest, target = Manifest.read(draft), self.path(version)
        with disk_errors(draft):
            _link_rest(checkpoint, draft)
            replace(manifest, version=version).write(draft)
            (draft / _OWNER).unlink(missing_ok=True)
            if target.exists():
                shutil.rmtree(target)
            self._known.add(version)  # before it is there: `prune` may run beside this
            draft.rename(target)
            _sync(self.folder)
        if (owner := self._owned.pop(draft, None)) is not None:
            os.close(owner)
        return target

    def remove(self, version: int) -> None:
        """Forget a version that came to nothing."""
        self._known.discard(version)
        shutil.rmtree(self.path(version), ignore_errors=True)

    def note_holder(self, version: int, incarnation: str) -> None:
        """Write down that this engine holds the version, for a gateway that is started anew; see `adopt`."""
        with disk_errors(self.path(version)), (self.path(version) / HELD_BY).open("a", encoding="utf-8") as notes:
            notes.write(f"{incarnation}\n")

    def note_held(self, version: int | None, incarnations: Iterable[str]) -> None:
        """Write down what engines hold that cannot say it themselves, be it kept here or not; None is a mixture."""
        notes = self._notes()
        for incarnation in incarnations:
            notes.pop(incarnation, None)  # those noted last stand last
            notes[incarnation] = version
        path = self.folder / _HOLDERS
        with disk_errors(path):
            whole = path.with_suffix(".new")
            whole.write_text(json.dumps(dict(list(notes.items())[-_HOLDERS_NOTED:])), encoding="utf-8")
            whole.rename(path)

    def held_by(self, incarnation: str) -> int | None:
        """What `note_held` said of this engine last; 0 where it said nothing."""
        return self._notes().get(incarnation, 0)

    def _notes(self) -> dict[str, int | None]:
        try:
            notes: dict[str, int | None] = json.loads((self.folder / _HOLDERS).read_bytes())
            return notes
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StoreFailed(f"{self.folder / _HOLDERS} cannot be read: {error!r}") from error

    def adopt(self, version: int, incarnation: str) -> bool:
        """Know a version from before our start, if it is the one that the engine `incarnation` was noted to hold."""
        if version not in self._known and self._was_held(version, incarnation):
            self._known.add(version)
        return version in self._known

    def last_held_by(self, incarnation: str) -> int:
        """The last version that this engine was noted to hold; 0 where there is none."""
        numbers = [int(name) for path in self.folder.glob("v*") if (name := path.name[1:]).isdecimal()]
        return max((version for version in numbers if self._was_held(version, incarnation)), default=0)

    def join(self, draft: Path) -> None:
        """Make a draft of another process whole where some of its tensors are changes to those of a version.

        Raises `InvalidRequest` before anything is written where that version is not here, or another than was meant.
        """
        manifest = Manifest.read(draft)
        if all(tensor.file for tensor in manifest.tensors.values()):
            return
        if manifest.base not in self._known:
            raise InvalidRequest(
                f"snapshot = {draft.name!r} has changes to version {manifest.base}, and the store keeps "
                f"{self.versions}: push the tensors whole",
                param="snapshot",
            )
        with self.reading(manifest.base) as base:
            join(draft, base)

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """The version's folder, which is not removed meanwhile. Raises `StoreFailed` where it is not there."""
        if version not in self._known:
            raise StoreFailed(f"version {version} is not in {self.folder}")
        with disk_errors(self.path(version)):
            lock = os.open(self.path(version) / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield self.path(version)
        finally:
            os.close(lock)

    def prune(self, served: int, keep: int = 2) -> None:
        """Keep `keep` versions up to the one served and those being read; remove the rest, and other runs' ones."""
        folders = list(
            self.folder.glob("v*")
        )  # before the versions: what is promoted meanwhile is known, or not listed
        known = self.versions
        before = [version for version in known if version < served]
        newer = [version for version in known if version > served]  # about to be served
        kept = {served, *newer, *before[max(0, len(before) - keep + 1) :]}
        for folder in folders:
            number = folder.name[1:]
            if number.isdecimal() and int(number) not in kept and not _is_read(folder):
                self.remove(int(number))

    def _was_held(self, version: int, incarnation: str) -> bool:
        try:
            holders = (self.path(version) / HELD_BY).read_text(encoding="utf-8").splitlines()
            return incarnation in holders and Manifest.read(self.path(version)).version == version
        except (OSError, StoreFailed):
            return False

    def _check_ours(self) -> None:
        """/dev/shm is everybody's: a folder that another user put there could feed us his weights."""
        status = self.folder.lstat()
        if status.st_uid != os.getuid():
            raise StoreFailed(f"{self.folder} belongs to user {status.st_uid}: give another folder in weights.store")


def remove_store(folder: Path) -> bool:
    """Remove a whole store with its versions; False where there is none, or a gateway keeps it."""
    if not folder.is_dir():
        return False
    try:
        store = WeightStore(folder)
    except StoreFailed:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    store.close()
    return True


def claim_draft(store: Path) -> tuple[Path, int]:
    """A new draft folder, and the descriptor that marks its writer as alive until closed."""
    folder = store / f"{_DRAFT}{uuid.uuid4().hex}"
    with disk_errors(folder):
        folder.mkdir(mode=0o700)
        owner = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    return folder, owner


def complete(draft: Path, base: Path | None, names: Iterable[str]) -> None:
    """Add to a finished draft what of `names` it lacks, from the checkpoint or version in folder `base`."""
    manifest = Manifest.read(draft)
    if set(names) <= manifest.tensors.keys():
        return
    added = Draft(draft, manifest.model, manifest.tensors, manifest.base)
    added.complete_from(base, names)
    added.finish()


def join(draft: Path, base: Path) -> None:
    """Make a finished draft whole that has changes to the version in folder `base`; see `Draft.join`."""
    manifest = Manifest.read(draft)
    joined = Draft(draft, manifest.model, manifest.tensors, manifest.base)
    joined.join(base)
    joined.finish()


def is_whole(draft: Path) -> bool:
    """Whether its writer has finished it. Raises `StoreFailed` where it never will."""
    if (draft / _FAILED).is_file():
        raise StoreFailed((draft / _FAILED).read_text(encoding="utf-8"))
    if not draft.is_dir():
        raise StoreFailed(f"{draft} is gone")
    return (draft / MANIFEST).is_file()


def check_bytes(folder: Path) -> Manifest:
    """The manifest of a draft or version whose files hold what it says; `InvalidRequest` where they do not."""
    manifest = Manifest.read(folder)
    try:
        spans_of = read_spans(folder)
    except ValueError as error:
        raise InvalidRequest(f"{folder} holds a file that is no safetensors: {error}", param="snapshot") from error
    with ThreadPoolExecutor(THREADS, thread_name_prefix="check") as pool:
        checks = [pool.submit(_check_file, folder / file, spans, manifest) for file, spans in spans_of.items()]
    found = {name for check in checks for name in check.result()}
    if missing := manifest.tensors.keys() - found:
        raise InvalidRequest(f"the manifest names {min(missing)!r}, no file has it", param="snapshot")
    return manifest


def _check_file(path: Path, spans: Sequence[Span], manifest: Manifest) -> list[str]:
    """Names of the tensors in a file, all of them as the manifest has them."""
    with _mapped(path) as content:
        for span in spans:
            entry = manifest.tensors.get(span.name)
            if entry is None or entry.file != path.name:
                raise InvalidRequest(f"{path.name} holds {span.name!r}, the manifest not", param="snapshot")
            if (entry.dtype, entry.shape) != (span.dtype, list(span.shape)):
                raise InvalidRequest(
                    f"the manifest calls {span.name!r} {entry.dtype} {entry.shape}, the file {span.dtype} "
                    f"{list(span.shape)}",
                    param="snapshot",
                )
            with memoryview(content) as whole, whole[span.begin : span.end] as part:
                damaged = digest_of(part) != entry.digest
            if damaged:
                raise InvalidRequest(
                    f"tensor {span.name!r} in {path.name} is damaged: its bytes are not those of the manifest's digest",
                    param="snapshot",
                )
    return [span.name for span in spans]


def raw(name: str, dtype: str, shape: Sequence[int], content: bytes | bytearray | memoryview) -> RawTensor:
    """A tensor from a copy of its bytes."""
    buffer = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)
    return RawTensor(name, dtype, shape, ctypes.addressof(buffer), len(content), buffer)


def _copied(content: mmap.mmap, name: str, dtype: str, shape: Sequence[int], begin: int, end: int) -> RawTensor:
    with memoryview(content) as whole, whole[begin:end] as part:
        return raw(name, dtype, shape, part)


def _told(tensor: StoredTensor) -> dict[str, Any]:
    return {key: value for key, value in asdict(tensor).items() if value != ""}


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are to be written and {free} are free")


def _files_of(tensor: StoredTensor) -> list[str]:
    return [file for file in (tensor.file, tensor.changes) if file]


def _number(file: str) -> int:
    """Of "model-00003.safetensors", 3; 0 where the name has none."""
    number = file.partition(".")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _read_changes(path: Path, name: str) -> ChangedElements:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return ChangedElements(file.get_tensor(name + _GAPS), file.get_tensor(name + _VALUES))
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidRequest(f"{path} does not tell the changes of {name!r}: {error}", param="snapshot") from error


def _batches(spans: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for span in spans:
        batch.append(span)
        if sum(one.end - one.begin for one in batch) >= SHARD_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _link_rest(checkpoint: Path | None, folder: Path) -> None:
    if checkpoint is None or not checkpoint.is_dir():
        return
    for path in checkpoint.iterdir():
        is_weights = path.name == MANIFEST or any(path.match(pattern) for pattern in WEIGHT_FILES)
        if path.is_file() and not is_weights and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())


def _claimed(draft: Path) -> int | None:
    """The lock of a draft whose owner is dead; None where it lives."""
    try:
        owner = os.open(draft / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # gone in this moment
    if try_lock(owner):
        return owner
    os.close(owner)
    return None


def _is_read(folder: Path) -> bool:
    try:
        lock = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(lock)
    finally:
        os.close(lock)


def try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now; it ends with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the file system has against us, in our words."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        remedy = (
            "; the disk of the weight store is full: make room, or name a larger one in weights.store" if full else ""
        )
        raise StoreFailed(f"cannot write {path}: {error}{remedy}") from error
