"""Leaves out of vLLM's start (0.32) what takes time and gives our engines nothing, and does at once what can be."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

_TASKS = ("generate",)
"""What an engine here can do; one that can do more builds its routes when it says so."""


def start_quickly() -> None:
    """Have this process of vLLM start so. Its forks do too. Another release starts as it does."""
    from vllm import __version__, envs
    from vllm.platforms import current_platform

    if not __version__.startswith("0.32."):
        return
    if current_platform.is_cuda():
        _name_gpu_without_cuda()
        # vLLM names a folder where it compiles a model, and none where it loads one: its first restart compiled again.
        with suppress(OSError):  # it is read-only
            os.makedirs(folder := os.path.join(envs.VLLM_CACHE_ROOT, "triton_cache"), exist_ok=True)
            os.environ.setdefault("TRITON_CACHE_DIR", folder)
    if "VLLM_GPU_SYNC_CHECK" not in os.environ:
        _leave_patterns_out()
    for name in ("__main__", "vllm.entrypoints.launchers.api_server.entry"):  # the CPU build runs it as a program
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "build_and_serve"):
            _build_routes_early(module)
    _search_kernels_in_vllm_alone()


def _name_gpu_without_cuda() -> None:
    """Have torch ask NVML for a GPU's capability until this process has initialized CUDA.

    FlashInfer (0.7) asks when it is imported, which vLLM's main process does with tensor parallelism, and no process
    with CUDA can fork the core and the workers.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import NvmlCudaPlatform

    if not isinstance(current_platform, NvmlCudaPlatform):
        return
    ask_cuda = torch.cuda.get_device_capability

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        found = None if torch.cuda.is_initialized() else current_platform.get_device_capability()
        return ask_cuda(device) if found is None else (found.major, found.minor)

    torch.cuda.get_device_capability = get_device_capability


def _leave_patterns_out() -> None:
    """Do not trace the patterns of torch's compiler after the graphs' capture.

    A start that finds compiled code has no use for them. vLLM wants them for its check of the GPU's waits alone; torch
    makes them itself when it compiles.
    """
    from vllm.compilation import compiler_interface

    compiler_interface.trigger_inductor_lazy_init = lambda _device=None: None


def _build_routes_early(server: Any) -> None:
    """Have an API process import and build its routes while the engine starts, for which it waits.

    server: vLLM's module of API servers.
    """
    from vllm.v1.engine.core_client import MPClient

    run, build, begin_waiting = server.run_server_worker, server.build_app, MPClient._start_mm_warmup

    async def run_server_worker(address: str, sock: Any, args: Any, *more: Any, **named: Any) -> None:
        def begin_waiting_and_build(client: Any) -> None:
            begin_waiting(client)  # vLLM's place for a thread: no fork comes after it
            pool = ThreadPoolExecutor(1)
            app = pool.submit(build, args, _TASKS, client.vllm_config.model_config)
            pool.shutdown(wait=False)
            server.build_app = lambda *asked: app.result() if tuple(asked[1]) == _TASKS else build(*asked)

        MPClient._start_mm_warmup = begin_waiting_and_build
        await run(address, sock, args, *more, **named)

    server.run_server_worker = run_server_worker


def _search_kernels_in_vllm_alone() -> None:
    """Let the CPU build search vLLM's modules for uses of the kernels that it replaces, not all 6,000 modules."""
    from vllm.triton_utils import dispatcher

    class Modules:
        @property
        def modules(self) -> dict[str, ModuleType]:
            return {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}

    dispatcher.sys = Modules()
