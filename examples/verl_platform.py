"""A CPU platform for verl, for laptops and CI, which verl 0.9.1 lacks. It is registered by an import:

export VERL_USE_EXTERNAL_MODULES=examples.verl_platform VERL_PLATFORM=cpu
"""

import contextlib
import os
import types
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MEMORY_BYTES = 16 << 30
_DOUBLED, _SINGLE = "cpu:gloo,cpu:gloo", "cpu:gloo"


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a call that a processor has no use for."""


class _CpuModule(types.ModuleType):
    """Replaces `torch.cuda`."""

    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(_do_nothing)
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(lambda *_: 0)
    mem_get_info = staticmethod(lambda *_: (_MEMORY_BYTES, _MEMORY_BYTES))
    current_device = staticmethod(lambda: "cpu")
    get_device_name = staticmethod(lambda *_: "CPU")
    is_initialized = staticmethod(lambda: True)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


_MODULE = _CpuModule("torch.cpu as verl's device")


class CpuPlatform(PlatformBase):
    """One device, the processor. verl counts Ray's GPUs: start Ray with one GPU per worker."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE

    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_do_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_do_nothing)
    is_available = is_platform_available = staticmethod(lambda *_, **__: True)
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_device_capability = staticmethod(lambda *_: (None, None))
    communication_backend_name = staticmethod(lambda: "gloo")
    visible_devices_envvar = staticmethod(lambda: "CUDA_VISIBLE_DEVICES")
    nvtx_range = staticmethod(contextlib.nullcontext)
    ray_resource_name = staticmethod(lambda: "GPU")
    ray_resource_options = staticmethod(lambda num_gpus: {"num_gpus": num_gpus})
    is_ipc_supported = staticmethod(lambda: False)

    def ray_noset_envvars(self) -> list[str]:
        return []

    def rollout_env_vars(self) -> dict[str, str]:
        return {}


def _install() -> None:
    """Register platform "cpu" with verl, and let torch accept the backend that verl then requests."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the name of FSDP's engine, which runs on any device
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    opened = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # verl requests a backend for the CPU and one for the accelerator; torch refuses the same device twice.
        opened(_SINGLE if backend == _DOUBLED else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


_install()
