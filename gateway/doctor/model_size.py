"""How large a model is, from its checkpoint or its name; with what follows for memory."""

import json
import re
from pathlib import Path

BYTES_PER_PARAMETER = 2  # bfloat16
# Of Qwen2, for models whose config.json is elsewhere: the largest of the usual ones, nearly.
USUAL_VOCABULARY = 152_064

_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")
_MILLIONS_IN_NAME = re.compile(r"(?<![\w.])(\d+)\s*[mM](?![a-zA-Z0-9])")


def weight_gib(model: str) -> float | None:
    """GiB of a model's weights in bfloat16: the sum of its files where it is a folder here, else from a name such as
    Qwen2-7B; None where neither tells."""
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
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
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        size = (config.get("text_config") or config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def context(model: str) -> int | None:
    """Positions that the model has, where config.json is here."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        size = (config.get("text_config") or config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None
