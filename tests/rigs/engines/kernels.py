"""Kernels in tests: run by a GPU where there is one, and by Triton's interpreter otherwise."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def small_programs_of(module: ModuleType) -> Iterator[None]:
    """Have a module's kernel run here; a tensor of some bytes takes several programs of it."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        importlib.reload(module)
        patch.undo()
        patch.setattr(module, "_LANES", 4)
        patch.setattr(module, "_ROUNDS", 2)
        yield
    importlib.reload(module)
