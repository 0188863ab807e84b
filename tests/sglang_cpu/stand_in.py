"""Stand-ins for modules that SGLang imports and a CPU lacks: their names can be imported, and raise when used.

SGLang's CPU kernels come in no wheel, and torchvision's wheels want PyTorch's CUDA build. On CPU SGLang computes in
plain torch and needs little more of either than that it can be imported. Tests put this folder on the engine's
PYTHONPATH; the packages beside this file take the two names.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Absent:
    """Stands for a function or class that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not in SGLang's environment for CPU tests")


def absent_names(module: str) -> Callable[[str], Absent]:
    """The `__getattr__` of a module in which every name can be imported."""

    def getattr_(name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return Absent(f"{module}.{name}")

    return getattr_


def add_absent_module(name: str) -> ModuleType:
    """Make `name` importable, as a module in which every name can be imported."""
    module = ModuleType(name)
    module.__path__ = []  # it may have modules below it
    module.__getattr__ = absent_names(name)  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)
    return module
