"""The manifest of a weight version, and the check of its files against it. Needs neither engine nor torch."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from engines.checkpoint.folder import Span, read_spans
from engines.errors import InvalidRequest, StoreFailed
from engines.store.files import THREADS, read_at, sync

MANIFEST = "manifest.json"

_FORMAT = 1
_PIECE_BYTES = 1 << 20  # read and digested at a time: they fit into a core's cache


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a version. `dtype` as torch names it ("bfloat16"); `file` is the safetensors file that holds it.
    `digest` is "" for one that was written from a GPU."""

    dtype: str
    shape: list[int]
    digest: str
    file: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a version."""

    model: str
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `StoreFailed` where the folder has no readable manifest."""
        path = folder / MANIFEST
        try:
            tree = json.loads(path.read_bytes())
            tensors = {name: StoredTensor(**entry) for name, entry in tree["tensors"].items()}
            if tree["format"] != _FORMAT:
                raise ValueError(f"format {tree['format']!r}, this is format {_FORMAT}")
            return cls(tree["model"], tensors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreFailed(f"{path} is no manifest of a weight version: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Writes atomically: readers see the whole manifest or none."""
        tree = {
            "format": _FORMAT,
            "model": self.model,
            "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()},
        }
        whole = folder / f"{MANIFEST}.new"
        whole.write_text(json.dumps(tree), encoding="utf-8")  # with indent it is written in Python, by an engine
        sync(whole)
        whole.rename(folder / MANIFEST)
        sync(folder)


def digest_of(content: Any) -> str:
    """Digest of a tensor's bytes. xxh3_128 reads 14 GB/s on a core (blake2b 0.3) and detects damage, not forgery:
    a process that can write into the store can write a manifest."""
    return _told(xxhash.xxh3_128(content))


def _digest_in(file: BinaryIO, span: Span, memory: memoryview) -> str:
    """Digest of a tensor in a file, read through `memory`. Raises `OSError` where the file ends before.

    Not of a mapped file: one that its writer cuts off meanwhile would end this process.
    """
    digest = xxhash.xxh3_128()
    for begin in range(span.begin, span.end, len(memory)):
        piece = memory[: span.end - begin]
        read_at(file, piece, begin)
        digest.update(piece)
    return _told(digest)


def _told(digest: xxhash.xxh3_128) -> str:
    return f"xxh3_128:{digest.hexdigest()}"


def check_bytes(folder: Path) -> Manifest:
    """Checks the files against the manifest and returns it.

    Raises `InvalidRequest` where they differ or a file cannot be read, `StoreFailed` as `Manifest.read` does.
    """
    manifest = Manifest.read(folder)
    try:
        spans_of = read_spans(folder)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="check") as pool:
            checks = [pool.submit(_check_file, folder / file, spans, manifest) for file, spans in spans_of.items()]
        found = {name for check in checks for name in check.result()}
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder} holds a file that cannot be read: {error}", param="snapshot") from error
    if missing := manifest.tensors.keys() - found:
        raise InvalidRequest(f"the manifest names {min(missing)!r}, no file has it", param="snapshot")
    return manifest


def _check_file(path: Path, spans: Sequence[Span], manifest: Manifest) -> list[str]:
    """Checks one file against the manifest; returns the names of its tensors."""
    memory = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb") as file:
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
            if entry.digest and _digest_in(file, span, memory) != entry.digest:
                raise InvalidRequest(
                    f"tensor {span.name!r} in {path.name} is damaged: its bytes are not those of the manifest's digest",
                    param="snapshot",
                )
    return [span.name for span in spans]
