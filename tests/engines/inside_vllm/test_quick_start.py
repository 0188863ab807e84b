"""What vLLM's start does at once: with a played API process. A real engine starts so in `test_real_warm_start.py`."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm import quick_start

APP, OTHER_APP = object(), object()


class Client:
    """Stands for vLLM's client of the engine, which waits for it in its constructor."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config="model")
        self._start_mm_warmup()

    def _start_mm_warmup(self) -> None: ...


async def app_of(tasks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the app of an API process whose engine can do `tasks`, and the builds; one before the engine is ready."""
    core_client = pytest.importorskip("vllm.v1.engine.core_client")
    monkeypatch.setattr(core_client, "MPClient", Client)
    monkeypatch.setattr(Client, "_start_mm_warmup", Client._start_mm_warmup)
    built: list[tuple[Any, ...]] = []
    is_built = threading.Event()

    def build_app(*asked: Any) -> object:
        built.append(asked)
        is_built.set()
        return APP if len(built) == 1 else OTHER_APP

    served = []

    async def run_server_worker(address: str, sock: Any, args: Any, client_config: Any = None) -> None:
        client = Client()
        assert is_built.wait(10), "nothing was built while the engine started"
        served.append(server.build_app(args, tasks, client.vllm_config.model_config))

    server: Any = SimpleNamespace(run_server_worker=run_server_worker, build_app=build_app)
    quick_start._build_routes_early(server)
    await server.run_server_worker("address", None, "args", {})
    return served[0], built


async def test_routes_are_built_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    app, built = await app_of(("generate",), monkeypatch)
    assert app is APP
    assert built == [("args", ("generate",), "model")]


async def test_an_engine_that_can_do_more_has_its_own_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    app, built = await app_of(("generate", "transcription"), monkeypatch)
    assert app is OTHER_APP
    assert built[1] == ("args", ("generate", "transcription"), "model")


@pytest.mark.parametrize(("capability", "told"), [((9, 0), "9.0a"), ((10, 3), "10.3a"), ((12, 0), None)])
def test_flashinfer_is_told_the_architecture_that_it_would_ask_cuda_for(
    capability: tuple[int, int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    played = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    monkeypatch.setattr(platforms, "current_platform", played)
    monkeypatch.setattr(os, "environ", {})
    assert quick_start.tell_flashinfer() == (told is not None)
    assert os.environ.get("FLASHINFER_CUDA_ARCH_LIST") == told


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
