"""How large a model is, from its checkpoint or its name; with what follows for memory."""

import json
import re
from pathlib import Path

from engines.checkpoint import checkpoint_files
from engines.model_folder import cached_folder

BYTES_PER_PARAMETER = 2  # bfloat16
# Of Qwen2, for models whose config.json is elsewhere: the largest of the usual ones, nearly.
USUAL_VOCABULARY = 152_064

_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
_MILLIONS_IN_NAME = re.compile(r"(?<![\w.])(\d+)\s*[mM](?![a-zA-Z0-9])")


def weight_gib(model: str) -> float | None:
    """GiB of a model's weights in bfloat16: the sum of its files where they are here, else from a name such as
    Qwen2-7B; None where neither tells."""
    if folder := _folder(model):
        size = sum(file.stat().st_size for file in checkpoint_files(folder) if file.is_file())
        if size:
            return size / 2**30
    name = model.rstrip("/").rpartition("/")[2].replace("-", " ").replace("_", " ")
    if found := _IN_NAME.search(name):
        return float(found[1]) * 1e9 * BYTES_PER_PARAMETER / 2**30
    if found := _MILLIONS_IN_NAME.search(name):
        return float(found[1]) * 1e6 * BYTES_PER_PARAMETER / 2**30
    return None


def vocabulary(model: str) -> int | None:
    """Entries of the vocabulary, where config.json is here."""
    return _told(model, "vocab_size")


def context(model: str) -> int | None:
    """Positions that the model has, where config.json is here."""
    return _told(model, "max_position_embeddings")


def _told(model: str, key: str) -> int | None:
    if (folder := _folder(model)) is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        value = (config.get("text_config") or config).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, int) else None


def _folder(model: str) -> Path | None:
    """`model` where it is a folder, else what the Hugging Face cache has of that id."""
    if not model:
        return None
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else cached_folder(model)
