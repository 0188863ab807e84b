"""The size of a model, from its files, else from config.json as `plan` reads it, else from its name."""

import re
from pathlib import Path

from engines.checkpoint.folder import stored_bytes
from engines.errors import ConfigError
from engines.model_folder import cached_folder
from tuning.plan.shape import ModelShape, read_shape

BYTES_PER_PARAMETER = 2  # bfloat16
_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
# Bytes a parameter of checkpoints whose name has the sign; embeddings keep two.
_BYTES_IN_NAME = (
    (re.compile(r"fp8|int8|w8a8", re.IGNORECASE), 1.05),
    (re.compile(r"awq|gptq|int4|4bit|w4a16|mxfp4|nvfp4|gpt-oss", re.IGNORECASE), 0.57),
)
_PLAIN_IN_NAME = re.compile(r"bf16|bfloat16|fp16", re.IGNORECASE)
_MILLIONS_IN_NAME = re.compile(r"(?<![\w.])(\d+)\s*[mM](?![a-zA-Z0-9])")


def weight_gib(model: str) -> float | None:
    """Return the GiB of a model's weights: the sum of local files, else by config.json, else by a name such as
    Qwen2-7B-AWQ; None where no source has a size."""
    if (folder := _folder(model)) and (size := _stored(folder) or _shaped(folder)):
        return size / 2**30
    signs = () if _PLAIN_IN_NAME.search(model) else _BYTES_IN_NAME
    each = next((size for sign, size in signs if sign.search(model)), BYTES_PER_PARAMETER)
    name = model.rstrip("/").rpartition("/")[2].replace("-", " ").replace("_", " ")
    if found := _IN_NAME.search(name):
        return float(found[1]) * 1e9 * each / 2**30
    if found := _MILLIONS_IN_NAME.search(name):
        return float(found[1]) * 1e6 * each / 2**30
    return None


def _shaped(folder: Path) -> float:
    """Return the bytes by config.json; 0 for an unknown shape."""
    shape = model_shape(str(folder))
    return shape.weight_bytes if shape else 0.0


def model_shape(model: str) -> ModelShape | None:
    """Return the shape by a local config.json; None without one, and where `plan` cannot size it."""
    if (folder := _folder(model)) is None:
        return None
    try:
        return read_shape(folder)
    except ConfigError:
        return None


def context(model: str) -> int | None:
    """Return the positions of the model; None where its shape is not known."""
    shape = model_shape(model)
    return shape.positions if shape else None


def _stored(folder: Path) -> int:
    """Return the bytes of a checkpoint's files here; 0 where its index is damaged, too."""
    try:
        return stored_bytes(folder)
    except ValueError:
        return 0


def _folder(model: str) -> Path | None:
    """Return `model` if it is a folder, else the folder of that id in the Hugging Face cache."""
    if not model:
        return None
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else cached_folder(model)
