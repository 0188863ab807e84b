"""The folder of an engine's model on this machine."""

import json
import os
from pathlib import Path

from engines.checkpoint.folder import checkpoint_files
from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind

_HUB_TIMEOUT_S = 5.0
_FOR_THE_ENGINE = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE", "HF_TOKEN_PATH")


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


def check_fetchable(config: EngineConfig) -> None:
    """Raise `ConfigError` where the model is not in the Hugging Face cache, nor given by the hub within seconds.

    What the engine alone can tell passes: folders, other hubs, other tokens, models that have no config.json."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    env, revision = {**os.environ, **config.env}, config.extra.get("revision")
    is_elsewhere = config.kind is EngineKind.SIM or any(env.get(name) for name in _FOR_THE_ENGINE)
    if is_elsewhere or Path(config.model).is_dir() or cached_folder(config.model, _cache(config), revision):
        return
    try:
        url = hf_hub_url(config.model, "config.json", revision=revision, endpoint=env.get("HF_ENDPOINT"))
        get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
    except (HFValidationError, EntryNotFoundError):
        return
    except Exception as error:  # the errors of a connection differ between releases of the hub's client
        said = str(error).partition("\n")[0]
        raise ConfigError(
            f"engine.model = {config.model!r} is not in the Hugging Face cache, and the hub does not give it: {said}; "
            "correct it, download the model first, or set HF_TOKEN where the model is not public"
        ) from error


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
