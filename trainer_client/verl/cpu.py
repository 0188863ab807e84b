"""verl's training without an accelerator, for laptops and CI: `VERL_PLATFORM=cpu`. verl 0.9.1 has no such platform."""

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MEMORY_BYTES = 16 << 30
_DOUBLED, _SINGLE = "cpu:gloo,cpu:gloo", "cpu:gloo"


def install() -> None:
    """Make "cpu" a platform of verl, and have torch take the backend that verl then asks for."""
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # FSDP's engine goes by this name, and runs anywhere
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    opened = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        # verl asks for one backend for the CPU and one for the accelerator, which torch refuses where they are one.
        opened(_SINGLE if backend == _DOUBLED else backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    _copy_saved_weights()


def _copy_saved_weights() -> None:
    """verl keeps a step's first weights by moving them to the CPU. Where they are there, that gives the same memory."""
    from verl.utils import fsdp_utils  # asks for the platform

    save = fsdp_utils.fsdp2_sharded_save_to_cpu

    def saved(model: torch.nn.Module) -> Any:
        state, spec = save(model)
        return {name: (tensor.clone(), its_spec) for name, (tensor, its_spec) in state.items()}, spec

    fsdp_utils.fsdp2_sharded_save_to_cpu = saved


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a call that a processor has no use for."""


class _CpuModule(types.ModuleType):
    """Answers in the place of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = reset_peak_memory_stats = staticmethod(_do_nothing)

    def current_device(self) -> str:
        return "cpu"

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return _MEMORY_BYTES, _MEMORY_BYTES

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def is_initialized(self) -> bool:
        return True

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


_MODULE = _CpuModule("torch.cpu as verl's device")


class CpuPlatform(PlatformBase):
    """One device, the processor. Ray's GPUs are counted in its place: start Ray with as many as there are workers."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE

    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_do_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_do_nothing)

    def is_available(self, *_: Any, **__: Any) -> bool:
        return True

    is_platform_available = is_available

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}
