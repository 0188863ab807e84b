"""vLLM general plugin: registers the gloo weight transfer backend in every vLLM process. `gloo_receiver.py` has it.

It also makes vLLM fork the processes that it would spawn, ends them with their parent, gives it AMX, and starts a
standby with lean memory.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import register_after_fork
from typing import Any

from engines.process_tree import end_with_parent
from engines.types import MARK

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's environment variable: fork makes it fork core and workers unless CUDA is initialized, and with us its
API processes. Without the variable its command spawns."""

STANDBY = "ROLLOUT_GATEWAY_STANDBY"
"""Environment variable of an engine that starts beside another, without memory for weights and KV cache."""


def register() -> None:
    """Register the backend by name. vLLM calls this in every process at its start, before most imports."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM refuses a name that is registered already: a process that it forked loads plugins a second time.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "gloo", "engines.inside_vllm.gloo_receiver", "GlooWeightTransferEngine"
        )
    if os.environ.get(METHOD) == "fork":
        _fork_processes()
    if MARK in os.environ:  # elsewhere, as in a trainer, a thread that ends may have started the process
        from engines.inside_vllm.quick_start import start_quickly

        start_quickly()
        # Where the guard is killed, nobody else would end the core, which holds the GPUs.
        register_after_fork(end_with_parent, end_with_parent)
        if multiprocessing.parent_process() is not None:
            end_with_parent()
    if STANDBY in os.environ:
        from engines.inside_vllm.lean_memory import start_lean

        start_lean()
    _permit_amx()


def _permit_amx() -> None:
    """Ask Linux for AMX, for this process. vLLM uses it in bfloat16 where the CPU has it, and does not ask: an illegal
    instruction ended its core at the first prompt."""
    import torch

    with contextlib.suppress(AttributeError):  # another release of torch, for which vLLM may ask
        torch.cpu._init_amx()


def _fork_processes() -> None:
    """Make vLLM fork where it spawns all the same: a spawned process imports all modules again, which takes seconds.

    On CPU vLLM sets the variable to spawn, which it needs where OpenMP's threads are bound to cores. API processes use
    no GPU.
    """
    from vllm.v1 import utils
    from vllm.v1.engine import utils as of_the_core

    def forking(chosen: Callable[[], Any] = of_the_core.get_mp_context) -> Any:
        os.environ[METHOD] = "fork"
        return chosen()

    of_the_core.get_mp_context = forking
    utils.multiprocessing = _Forking()


class _Forking:
    """The module `multiprocessing` where every context forks."""

    def get_context(self, _method: str | None = None) -> ForkContext:
        return _ForkContext()

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


class _ApiProcess(ForkProcess):
    """Has its parent's modules: it does not load plugins again, nor does prometheus_client see by itself that it is one
    of several processes."""

    def run(self) -> None:
        from prometheus_client import values

        values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        super().run()


class _ForkContext(ForkContext):
    Process = _ApiProcess
