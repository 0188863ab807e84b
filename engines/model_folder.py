"""The folder of an engine's model on this machine."""

import json
import os
from pathlib import Path

from engines.checkpoint import checkpoint_files
from engines.config import EngineConfig
from engines.types import EngineKind


def model_folder(config: EngineConfig) -> Path | None:
    """Return `engine.model` if it is a folder, else the model's folder in the Hugging Face cache if complete, else
    None."""
    if config.kind in (EngineKind.SIM, EngineKind.EXTERNAL) or not config.model:
        return None
    if (folder := Path(config.model)).is_dir():
        return folder
    cached = cached_folder(config.model, _cache(config), config.extra.get("revision"))
    return cached if cached and _is_complete(cached) else None


def _is_complete(folder: Path) -> bool:
    """Return True where all files of a checkpoint are there. A damaged index is downloaded anew."""
    try:
        files = checkpoint_files(folder)
    except ValueError:
        return False
    return bool(files) and all(file.is_file() for file in files)


def is_quantised(folder: Path) -> bool:
    """Return True for a quantised checkpoint, by its config.json."""
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_bytes()).get("quantization_config"))


def cached_folder(model: str, cache: str | None = None, revision: str | None = None) -> Path | None:
    """Return the folder of a model's config.json in the Hugging Face cache, where tensors may be missing.

    None if the cache has no such file, or `model` is not a model id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _cache(config: EngineConfig) -> str | None:
    """Return the engine's cache folder, from its settings or environment; None for the hub's default."""
    env = {**os.environ, **config.env}
    home = env.get("HF_HOME")
    return (
        config.extra.get("download_dir")
        or env.get("HF_HUB_CACHE")
        or env.get("HUGGINGFACE_HUB_CACHE")
        or (f"{home}/hub" if home else None)
    )
