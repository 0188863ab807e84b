"""Where the files of an engine's model lie on this machine."""

import os
from pathlib import Path

from engines.checkpoint import checkpoint_files
from engines.config import EngineConfig
from engines.types import EngineKind


def model_folder(config: EngineConfig) -> Path | None:
    """`engine.model` where that is a folder, or where the Hugging Face cache has all tensors of that id; else None."""
    if config.kind in (EngineKind.SIM, EngineKind.EXTERNAL) or not config.model:
        return None
    if (folder := Path(config.model)).is_dir():
        return folder
    cached = cached_folder(config.model, _cache(config), config.extra.get("revision"))
    files = checkpoint_files(cached) if cached else []
    return cached if files and all(file.is_file() for file in files) else None


def cached_folder(model: str, cache: str | None = None, revision: str | None = None) -> Path | None:
    """The folder of a model's config.json in the Hugging Face cache; its tensors may not all be there. None where the
    cache has none, or `model` is no id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _cache(config: EngineConfig) -> str | None:
    """Where the engine looks, by its own settings or those of its environment; None for the hub's own default."""
    env = {**os.environ, **config.env}
    home = env.get("HF_HOME")
    return (
        config.extra.get("download_dir")
        or env.get("HF_HUB_CACHE")
        or env.get("HUGGINGFACE_HUB_CACHE")
        or (f"{home}/hub" if home else None)
    )
