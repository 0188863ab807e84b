"""Starts of vLLM on a GPU. Real engines start quickly in `test_real_warm_start.py`."""

import os
import sys
from pathlib import Path
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


@pytest.mark.parametrize("named", ["", "/mine"])
def test_a_restart_finds_the_kernels_that_the_first_start_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str
) -> None:
    """vLLM names a folder of the model where it compiles it, and none where it loads what was compiled."""
    vllm = pytest.importorskip("vllm")
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    for step in (
        "_name_gpu_without_cuda",
        "_leave_patterns_out",
        "_build_routes_early",
        "_search_kernels_in_vllm_alone",
    ):
        monkeypatch.setattr(quick_start, step, lambda *_: None)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", named)  # so that it is as before after the test
    if not named:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    quick_start.start_quickly()
    assert os.environ["TRITON_CACHE_DIR"] == (named or str(tmp_path / "triton_cache"))
