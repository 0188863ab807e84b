"""What a LoRA adapter's folder says of itself, in PEFT's form, read without loading a tensor."""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.checkpoint import read_tensors
from engines.errors import InvalidRequest
from engines.types import TensorMeta

_PREFIX = "base_model.model."
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """`rank` is the largest of any module."""

    path: Path
    rank: int
    tensors: tuple[TensorMeta, ...]

    def check_fits(self, model: Sequence[TensorMeta]) -> None:
        """Raises `InvalidRequest` where a module has other sizes than the model's: vLLM 0.32 takes such an adapter.

        Modules that the model does not have are left to the engine, which knows what it can adapt.
        """
        shapes = {tensor.name: tensor.shape for tensor in model}
        for tensor in self.tensors:
            module, _, part = tensor.name.removeprefix(_PREFIX).rpartition(".lora_")
            whole = shapes.get(f"{module}.weight")
            if whole is None or part not in ("A.weight", "B.weight"):
                continue
            axis = 1 if part == "A.weight" else 0
            if tensor.shape[axis] != whole[axis]:
                raise _refused(
                    f"{self.path}: {tensor.name} has the shape {list(tensor.shape)}, which does not fit {module} of "
                    f"the served model, {list(whole)}: is it another model's adapter?"
                )


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
    return AdapterFolder(path, _rank(path / CONFIG_NAME), _tensors(path))


def _tensors(path: Path) -> tuple[TensorMeta, ...]:
    try:
        return read_tensors(path) or ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _refused(f"{path / WEIGHTS_NAME} is no whole safetensors file: {error!r}") from error


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
