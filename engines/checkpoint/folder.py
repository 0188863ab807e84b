"""Tensors of a checkpoint folder, read from the safetensors headers without loading a tensor."""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BufferedReader
from operator import index
from pathlib import Path
from typing import Any

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
_TIES = "tie_word_embeddings"
_FLOATS = {"half": "float16", "float": "float32"}

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""Files of a checkpoint folder that hold tensors, or index them."""

_PIECE_BYTES = 16 << 20


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
    """Return all tensors of a checkpoint folder; None if it has no safetensors or does not exist.

    Raise as `read_spans` does.
    """
    spans = (span for file in read_spans(folder).values() for span in file)
    return tuple(TensorMeta(name=span.name, dtype=span.dtype, shape=span.shape) for span in spans) or None


def known_tensors(folder: Path) -> tuple[TensorMeta, ...] | None:
    """Return as `read_tensors`; None also where files are not there or damaged: `load_format: dummy` reads none."""
    try:
        return read_tensors(folder)
    except (OSError, ValueError):
        return None


def served_in(dtype: str, tensors: Sequence[TensorMeta]) -> tuple[TensorMeta, ...]:
    """Return the tensors in the dtypes of an engine started with `dtype` (vLLM's name; "auto" keeps the
    checkpoint's)."""
    floats = _FLOATS.get(dtype, dtype)
    if floats == "auto":
        return tuple(tensors)
    return tuple(replace(tensor, dtype=floats) if tensor.dtype in CASTABLE else tensor for tensor in tensors)


def read_config(folder: Path) -> str:
    """Return the content of config.json; "" where there is none."""
    file = folder / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def tied_names(folder: Path) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tensor that a checkpoint stores more than once, as its configuration ties them.

    A stored head that differs from the embedding is not tied, whatever config.json says: engines load both.
    """
    config = read_config(folder)
    found = json.loads(config or "{}")
    if found.get(_TIES) is False:
        return ()
    text = found.get("text_config") or found
    tables = [
        (folder / file, span)
        for file, spans in read_spans(folder).items()
        for span in spans
        if len(span.shape) == 2 and span.shape[0] == text.get("vocab_size")
    ]
    begins = {_digest(file, span, _PIECE_BYTES) for file, span in tables}
    if len(begins) == len(tables) or not ties_embeddings(config):  # which may import transformers, for seconds
        return ()
    alike = defaultdict[str, list[str]](list)
    for file, span in tables:
        alike[f"{span.dtype} {span.shape} {_digest(file, span, span.num_bytes)}"].append(span.name)
    return tuple(tuple(sorted(names)) for names in alike.values() if len(names) > 1)


def ties_embeddings(config: str) -> bool:
    """Return True for a config.json that ties the head to the embedding, or leaves it to its class, which does."""
    found = json.loads(config or "{}")
    said = found.get(_TIES)
    if said is None and "model_type" in found:
        said = _default_of(found["model_type"])
    return bool((found.get("text_config") or {}).get(_TIES) if said is None else said)


def _default_of(model_type: str) -> bool | None:
    """Return what transformers' class ties by default; None where it has no such class, or that no word on it."""
    try:
        from transformers import AutoConfig
    except ImportError:
        return None
    try:
        return getattr(AutoConfig.for_model(model_type), _TIES, None)
    except ValueError:  # a model of other code
        return None


def _digest(file: Path, span: Span, most: int) -> str:
    digest, left = blake2b(), min(span.num_bytes, most)
    with file.open("rb") as stream:
        stream.seek(span.begin)
        while left and (piece := stream.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def written_dtype(dtype: str) -> str:
    """Return safetensors' name of a torch dtype."""
    return next((theirs for theirs, ours in _DTYPES.items() if ours == dtype), dtype)


def read_spans(folder: Path) -> dict[str, list[Span]]:
    """Return the tensors of each safetensors file of a folder, by file name.

    Raise `ValueError`, with its path, for a file that is no safetensors file or ends before the data of its tensors
    does, and `OSError` for a file that cannot be read. A dtype may be one that torch does not have, and a shape may
    have another size than its tensor's data.
    """
    return {file.name: read_file(file) for file in checkpoint_files(folder)}


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of the index if there is one, as engines do: some repositories hold a second copy of the
    weights.

    Raise `ValueError` for an index that cannot be read or understood, or that names a file elsewhere.
    """
    path = folder / "model.safetensors.index.json"
    if not os.path.lexists(path):  # a link to a file that is gone says that the index counts
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name or name in ("", "..") or "\0" in name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of a checkpoint: {error!r}") from error
    if elsewhere:
        raise ValueError(f"{path} names {elsewhere[0]!r}, which is no file of its folder")
    return [folder / name for name in names]


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's files, as far as they are here. Raise as `checkpoint_files` does."""
    return sum(file.stat().st_size for file in checkpoint_files(folder) if file.is_file())


def read_file(file: Path) -> list[Span]:
    """Return the tensors of one safetensors file. Raise as `read_spans` does."""
    with file.open("rb") as stream:
        try:
            return _read_header(stream)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is not a complete safetensors file: {error!r}") from error


def _read_header(stream: BufferedReader) -> list[Span]:
    length = int.from_bytes(stream.read(8), "little")
    size = os.fstat(stream.fileno()).st_size
    if length > size - 8:  # a damaged length could ask for more memory than there is
        raise ValueError(f"its header has {length} bytes")
    header = json.loads(stream.read(length))
    spans = [_span(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    for span in spans:
        if not span.begin <= span.end <= size:
            raise ValueError(f"tensor {span.name!r} ends at byte {span.end}, the file at byte {size}")
    return spans


def _span(name: str, entry: dict[str, Any], data_begin: int) -> Span:
    dtype, shape, (begin, end) = entry["dtype"], tuple(map(index, entry["shape"])), entry["data_offsets"]
    return Span(name, _DTYPES.get(dtype, str(dtype)), shape, data_begin + index(begin), data_begin + index(end))
