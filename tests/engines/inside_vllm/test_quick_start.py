"""What vLLM asks of a GPU before CUDA is initialized. Real engines start quickly in `test_real_warm_start.py`."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm import quick_start


def test_the_capability_of_a_gpu_is_known_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    platforms = pytest.importorskip("vllm.platforms")
    cuda: Any = ModuleType("vllm.platforms.cuda")
    cuda.NvmlCudaPlatform = SimpleNamespace  # the CPU build cannot import vLLM's
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", cuda)
    played = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(platforms, "current_platform", played)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ("asked CUDA of", device))
    is_initialized = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    quick_start._name_gpu_without_cuda()
    assert torch.cuda.get_device_capability(0) == (9, 0)
    is_initialized = True
    assert torch.cuda.get_device_capability(1) == ("asked CUDA of", 1)
