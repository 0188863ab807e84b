"""Mends updates of mixtures of experts in vLLM's CPU build (0.32): a reload leaves experts unpacked.

CPU kernels read packed weights, of the same shape. vLLM packs them when it makes the kernel. A reload keeps the kernel
and does not pack: the engine then computes with bytes in the wrong places, while every digest is right.
"""

from typing import Any


def mend() -> None:
    """Patch vLLM, once for each process, so that each reload packs experts."""
    from vllm import __version__
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    if __version__.startswith("0.32.") and not hasattr(Method, "packs_again"):
        Method.process_weights_after_loading = _packing_again(Method.process_weights_after_loading)
        Method.packs_again = True


def _packing_again(process: Any) -> Any:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        kernel = self.moe_kernel
        process(self, layer)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)

    return process_weights_after_loading
