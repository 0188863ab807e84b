"""What a checkpoint folder says of its tensors, read from the safetensors headers without loading a tensor."""

import json
import struct
from pathlib import Path

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


def read_tensors(model: str) -> tuple[TensorMeta, ...] | None:
    """All tensors of the checkpoint in folder `model`; None where it holds no safetensors or is no folder."""
    tensors = tuple(tensor for file in _files(Path(model)) for tensor in _read_header(file))
    return tensors or None


def _files(folder: Path) -> list[Path]:
    """Those of the index where there is one, as engines load them: some repositories hold a second copy beside it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))


def _read_header(file: Path) -> list[TensorMeta]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return [
        TensorMeta(name=name, dtype=_DTYPES.get(entry["dtype"], entry["dtype"]), shape=tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    ]
