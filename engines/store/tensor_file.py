"""Writes safetensors files piece by piece: no copy of a whole file is in memory, and each byte is read once."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from engines.checkpoint import written_dtype
from engines.store.files import write_at
from engines.store.manifest import told_digest


class Described(Protocol):
    """What the header says of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def num_bytes(self) -> int: ...


class Undigested(Described, Protocol):
    """A tensor to write. Its digest is made where it is ""."""

    @property
    def digest(self) -> str: ...


def header(tensors: Sequence[Described]) -> tuple[bytes, list[int]]:
    """The header of a file with these tensors in this order, and the offset of each tensor."""
    offsets = np.cumsum([0, *(tensor.num_bytes for tensor in tensors)]).tolist()
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, begin, end in zip(tensors, offsets[:-1], offsets[1:], strict=True):
        tree[tensor.name] = {
            "dtype": written_dtype(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + begin for begin in offsets[:-1]]


def write_file(path: Path, tensors: Sequence[Undigested], pieces: Iterable[memoryview]) -> list[str]:
    """Write a file and return the digest of each tensor. `pieces` are the tensors' bytes in order, cut anywhere.

    Raises `OSError`, and what `pieces` raises.
    """
    head, begins = header(tensors)
    digests = [None if tensor.digest else xxhash.xxh3_128() for tensor in tensors]
    ends = [begin + tensor.num_bytes for begin, tensor in zip(begins, tensors, strict=True)]
    place, index = len(head), 0
    with path.open("wb", buffering=0) as file:
        write_at(file.fileno(), head, 0)
        for piece in pieces:
            write_at(file.fileno(), piece, place)
            while piece:
                while place == ends[index]:
                    index += 1
                part = piece[: ends[index] - place]
                if (digest := digests[index]) is not None:
                    digest.update(part)
                piece, place = piece[len(part) :], place + len(part)
        os.fsync(file.fileno())
    return [
        tensor.digest if digest is None else told_digest(digest)
        for tensor, digest in zip(tensors, digests, strict=True)
    ]
