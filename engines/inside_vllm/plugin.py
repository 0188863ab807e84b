"""vLLM general plugin: tells every vLLM process of our weight transfer backends. What they do is in their own files."""

import contextlib
import multiprocessing
import os

FORK_CORE = "ROLLOUT_GATEWAY_FORK_CORE"
"""Environment variable, 1 where vLLM's engine core shall be forked from its API server."""


def register() -> None:
    """Called by vLLM in every process it starts, before it has imported much: only names are given here."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # Refused where it is known already: a process that vLLM forked loads plugins once more.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "gloo", "engines.inside_vllm.gloo_receiver", "GlooWeightTransferEngine"
        )
    if os.environ.get(FORK_CORE) == "1":
        _fork_the_core()


def _fork_the_core() -> None:
    """On CPU vLLM spawns its engine core, which then imports anew what the API server has: seconds of CPU for each
    start. It needs that where OpenMP's threads are bound to cores; with one thread a fork does, as on GPUs."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
