"""A LoRA adapter's folder in PEFT's format, read without loading a tensor."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.checkpoint.folder import read_tensors
from engines.errors import InvalidRequest
from engines.types import TensorMeta

_PREFIX = "base_model.model."
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A checked adapter; `rank` is the largest rank of its modules."""

    path: Path
    rank: int
    tensors: tuple[TensorMeta, ...]

    def check_fits(self, model: Sequence[TensorMeta]) -> None:
        """Raise `InvalidRequest` if a module's sizes differ from the model's: vLLM 0.32 accepts such an adapter.

        Modules unknown to the model are not checked: the engine knows which modules it can adapt.
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
    """Read an adapter. Raise `InvalidRequest` naming the file if no engine could load the folder."""
    if not path.is_absolute():
        raise _refused(f"{str(path)!r} is a relative path; give an absolute path, since engines run in other folders")
    if not path.is_dir():
        raise _refused(f"{path} does not exist here; save the adapter where the engines' machine can read it")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (path / name).is_file():
            raise _refused(
                f"{path} has no {name}: save the adapter with PEFT's save_pretrained (safe_serialization=True) "
                "and name the folder that holds its files"
            )
    return AdapterFolder(path, _rank(path / CONFIG_NAME), _tensors(path))


def _tensors(path: Path) -> tuple[TensorMeta, ...]:
    try:
        return read_tensors(path) or ()
    except (OSError, ValueError) as error:
        raise _refused(f"{path / WEIGHTS_NAME} is not a complete safetensors file: {error!r}") from error


def _rank(file: Path) -> int:
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{file} is not the configuration of a LoRA adapter with a rank r: {error!r}") from error
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise _refused(f"{file}: r and rank_pattern must be whole numbers above 0, and are {ranks}")
    return max(ranks)


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path: {message}", param="lora_path")
