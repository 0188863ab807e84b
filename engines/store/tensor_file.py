"""Writes safetensors files piece by piece: no copy of a whole file is in memory, and each byte is read once."""

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from engines.checkpoint.folder import written_dtype
from engines.store.manifest import told_digest
from engines.store.pieces import write_pieces


class Undigested(Protocol):
    """A tensor to write. Its digest is made where it is ""."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def digest(self) -> str: ...


def write_file(path: Path, tensors: Sequence[Undigested], pieces: Iterable[memoryview]) -> list[str]:
    """Write a file and return the digest of each tensor. `pieces` are the tensors' bytes in order, cut anywhere.

    Raises `OSError`, and what `pieces` raises.
    """
    return digests_of(tensors, write_pieces(str(path), *layout(tensors), pieces))


def layout(tensors: Sequence[Undigested]) -> tuple[bytes, list[int], list[bool]]:
    """The header of a file, the size of each tensor, and whether its digest is to be made."""
    return _header(tensors), [one.num_bytes for one in tensors], [not one.digest for one in tensors]


def _header(tensors: Sequence[Undigested]) -> bytes:
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


def digests_of(tensors: Sequence[Undigested], made: Sequence[str]) -> list[str]:
    """The digests of tensors, for some of which XXH3-128 was made."""
    return [one.digest or told_digest(digest) for one, digest in zip(tensors, made, strict=True)]
