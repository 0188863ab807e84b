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


def graphs_of(sizes: list[int], loras: list[int]) -> Any:
    """Return vLLM's graphs for batches of up to 512 requests, which it would capture."""
    pytest.importorskip("vllm")
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager: Any = object.__new__(CudaGraphManager)
    config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    manager.__dict__ |= {
        "compilation_config": config, "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE, "max_num_reqs": 512,
        "decode_query_len": 1, "varlen_decode": False, "lora_capture_cases": loras, "ubatch_runner": None,
        "_candidates": {}, "_capture_descs": {}, "_graphs_captured": True,
        "vllm_config": SimpleNamespace(
            speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False)
        ),
    }  # fmt: skip
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._init_candidates()
    return manager


def test_a_batch_with_a_prompt_runs_on_the_next_graph_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    monkeypatch.setattr(utils.CudaGraphManager, "_init_candidates", utils.CudaGraphManager._init_candidates)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 505, 16), 510]
    before = graphs_of(sizes, [0, 2])
    quick_start._capture_fewer_pieces()
    manager = graphs_of(sizes, [0, 2])
    full, pieces = (
        next(mode for mode in manager._capture_descs if mode.name == name) for name in ("FULL", "PIECEWISE")
    )
    assert manager._capture_descs[full] == before._capture_descs[full]
    kept = [one.num_tokens for one in manager._capture_descs[pieces] if one.num_active_loras == 0]
    assert kept == [510, *range(480, 31, -32), 16, 8, 4, 2, 1]
    for num_tokens in range(1, 511):
        for loras in (0, 2):
            mixed = manager.dispatch(1, num_tokens, None, loras)
            assert (mixed.cg_mode, mixed.num_active_loras) == (pieces, loras)
            assert mixed.num_tokens == min(size for size in kept if size >= num_tokens)
            assert manager.dispatch(num_tokens, num_tokens, 1, loras) == before.dispatch(
                num_tokens, num_tokens, 1, loras
            )
    assert manager.dispatch(1, 511, None, 0).cg_mode not in (full, pieces)
    named = graphs_of([24, 40], [0])
    assert [one.num_tokens for one in named._capture_descs[pieces]] == [40, 24]
