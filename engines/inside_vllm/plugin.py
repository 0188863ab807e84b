"""vLLM general plugin: registers the gloo weight transfer backend in every vLLM process. `gloo_receiver.py` has it.

On CPU it also gives vLLM a quick start, and AMX.
"""

import contextlib
import multiprocessing
import os

FORK_CORE = "ROLLOUT_GATEWAY_FORK_CORE"
"""Environment variable: 1 forks vLLM's engine core from its API server."""


def register() -> None:
    """Register the backend by name. vLLM calls this in every process at its start, before most imports."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM refuses a name that is registered already: a process that it forked loads plugins a second time.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "gloo", "engines.inside_vllm.gloo_receiver", "GlooWeightTransferEngine"
        )
    if os.environ.get(FORK_CORE) == "1":
        _fork_the_core()
    _permit_amx()


def _permit_amx() -> None:
    """Ask Linux for AMX, for this process. vLLM uses it in bfloat16 where the CPU has it, and does not ask: an illegal
    instruction ended its core at the first prompt."""
    import torch

    with contextlib.suppress(AttributeError):  # another release of torch, for which vLLM may ask
        torch.cpu._init_amx()


def _fork_the_core() -> None:
    """Make vLLM fork its engine core, as on GPUs.

    On CPU vLLM spawns the core, which imports all modules a second time: seconds of CPU for each start. It needs a
    spawn where OpenMP's threads are bound to cores; with one thread a fork is enough.
    """
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
