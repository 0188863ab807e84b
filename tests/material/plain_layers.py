"""A vLLM plugin: vLLM on CPU computes with its weights as they are loaded, as it does on GPUs, and notes its reloads
and the runs of its models' loaders. It can halt, see `tests/rigs/engines/halting.py`.

`environ` has an engine load it, beside the product's own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.material.vllm_plugin import python_path

_NOTES = "PLAIN_LAYERS_NOTES"
_RELOAD = "a layerwise reload"
_LOADERS = "a run of the loaders"


def environ(folder: Path) -> dict[str, str]:
    """The variables for an engine's environment; `reloads` reads `folder` afterwards."""
    notes = folder / "notes"
    notes.touch()
    return {"PYTHONPATH": python_path(folder, "plain_layers", f"{__name__}:register"), _NOTES: str(notes)}


def reloads(folder: Path) -> int:
    """Layerwise reloads that the engine has entered."""
    return _count(folder, _RELOAD)


def loader_runs(folder: Path) -> int:
    """How often the model's loaders have been given tensors, with content or to see what they do with them."""
    return _count(folder, _LOADERS)


def _count(folder: Path, what: str) -> int:
    return (folder / "notes").read_text().splitlines().count(what)


def register() -> None:
    """Called by vLLM in each of its processes, before it has a model."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import inplace
    from vllm.model_executor.models.utils import AutoWeightsLoader

    from engines.inside_vllm.in_place import DEVICES
    from tests.rigs.engines import halting

    halting.install()
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    DEVICES.add("cpu")
    if reload.initialize_layerwise_reload.__module__ != __name__:  # a forked process loads plugins once more
        noted = _noted(_RELOAD, reload.initialize_layerwise_reload)
        reload.initialize_layerwise_reload = inplace.initialize_layerwise_reload = noted
        AutoWeightsLoader.load_weights = _noted(_LOADERS, AutoWeightsLoader.load_weights)


def _noted(what: str, entered: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ[_NOTES], "a") as notes:
            notes.write(f"{what}\n")
        return entered(*args, **kwargs)

    return noted
