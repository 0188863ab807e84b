"""What a LoRA adapter's folder says of itself, in PEFT's form, read without loading a tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import InvalidRequest

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """`rank` is the largest of any module."""

    path: Path
    rank: int


def read_adapter(path: Path) -> AdapterFolder:
    """Raises `InvalidRequest`, which names the file at fault, where no engine could load the folder."""
    if not path.is_absolute():
        raise _refused(f"{str(path)!r} is no absolute path: engines run in folders of their own")
    if not path.is_dir():
        raise _refused(f"{path} is no folder here: save the adapter where the engines' machine can read it")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (path / name).is_file():
            raise _refused(
                f"{path} has no {name}: save the adapter with PEFT's save_pretrained (safe_serialization=True), and "
                "name the folder that the files are in"
            )
    return AdapterFolder(path, _rank(path / CONFIG_NAME))


def _rank(file: Path) -> int:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{file} is no configuration of a LoRA adapter with a rank r: {error!r}") from error
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise _refused(f"{file}: r and rank_pattern must be whole numbers above 0, and are {ranks}")
    return max(ranks)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path: {message}", param="lora_path")
