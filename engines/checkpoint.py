"""Tensors of a checkpoint folder, read from the safetensors headers without loading a tensor."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.announcement import CASTABLE
from engines.types import TensorMeta

# safetensors' names of dtypes -> torch's, which is how trainers announce them.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_FLOATS = {"half": "float16", "float": "float32"}

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""Files of a checkpoint folder that hold tensors, or index them."""


FileStates = tuple[tuple[str, int, int], ...]
"""Name, inode and change time of each file, which differ from other files of the same names."""


@dataclass(frozen=True, slots=True)
class Span:
    """The byte range of one tensor in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_tensors(folder: Path) -> tuple[TensorMeta, ...] | None:
    """Return all tensors of a checkpoint folder; None if it has no safetensors or does not exist."""
    spans = (span for file in read_spans(folder).values() for span in file)
    return tuple(TensorMeta(name=span.name, dtype=span.dtype, shape=span.shape) for span in spans) or None


def served_in(dtype: str, tensors: Sequence[TensorMeta]) -> tuple[TensorMeta, ...]:
    """Return the tensors in the dtypes of an engine started with `dtype` (vLLM's name; "auto" keeps the
    checkpoint's)."""
    floats = _FLOATS.get(dtype, dtype)
    if floats == "auto":
        return tuple(tensors)
    return tuple(replace(tensor, dtype=floats) if tensor.dtype in CASTABLE else tensor for tensor in tensors)


def written_dtype(dtype: str) -> str:
    """Return safetensors' name of a torch dtype."""
    return next((theirs for theirs, ours in _DTYPES.items() if ours == dtype), dtype)


def read_spans(folder: Path) -> dict[str, list[Span]]:
    """Return the tensors of each safetensors file of a folder, by file name."""
    return {file.name: _read_header(file) for file in checkpoint_files(folder)}


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of the index if there is one, as engines do: some repositories hold a second copy of the
    weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def file_states(folder: Path) -> FileStates:
    """Return the states of the files that hold a folder's tensors; none of a folder without any."""
    found = ((file.name, file.stat()) for file in checkpoint_files(folder))
    return tuple((name, stat.st_ino, stat.st_mtime_ns) for name, stat in found)


def _read_header(file: Path) -> list[Span]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return [
        Span(
            name,
            _DTYPES.get(entry["dtype"], entry["dtype"]),
            tuple(entry["shape"]),
            *(8 + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]
