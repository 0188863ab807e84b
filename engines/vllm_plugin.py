"""vLLM general plugin: tells every vLLM process of our weight transfer backends. What they do is in their own files."""

import contextlib


def register() -> None:
    """Called by vLLM in every process it starts, before it has imported much: only names are given here."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # Refused where it is known already: a process that vLLM forked loads plugins once more.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine("gloo", "engines.vllm_gloo", "GlooWeightTransferEngine")
