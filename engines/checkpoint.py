"""What a checkpoint folder says of its tensors, read from the safetensors headers without loading a tensor."""

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
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_FLOATS = {"half": "float16", "float": "float32"}

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""What of a checkpoint folder holds tensors, or says which file does."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the bytes of one tensor lie in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_tensors(folder: Path) -> tuple[TensorMeta, ...] | None:
    """All tensors of the checkpoint in a folder; None where it holds no safetensors or is no folder."""
    spans = (span for file in read_spans(folder).values() for span in file)
    return tuple(TensorMeta(name=span.name, dtype=span.dtype, shape=span.shape) for span in spans) or None


def served_in(dtype: str, tensors: Sequence[TensorMeta]) -> tuple[TensorMeta, ...]:
    """The tensors as an engine holds them that was started with `dtype`, as vLLM calls it: "auto" leaves them."""
    floats = _FLOATS.get(dtype, dtype)
    if floats == "auto":
        return tuple(tensors)
    return tuple(replace(tensor, dtype=floats) if tensor.dtype in CASTABLE else tensor for tensor in tensors)


def written_dtype(dtype: str) -> str:
    """safetensors' name of a dtype as torch calls it."""
    return next((theirs for theirs, ours in _DTYPES.items() if ours == dtype), dtype)


def read_spans(folder: Path) -> dict[str, list[Span]]:
    """The tensors of each safetensors file of a checkpoint folder, by the file's name."""
    return {file.name: _read_header(file) for file in checkpoint_files(folder)}


def checkpoint_files(folder: Path) -> list[Path]:
    """Those of the index where there is one, as engines load them: some repositories hold a second copy beside it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


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
