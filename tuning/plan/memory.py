"""The memory of a GPU in an engine. Estimates: engines measure their own at start."""

from dataclasses import dataclass

from tuning.plan.gpu import Gpu
from tuning.plan.shape import ModelShape
from tuning.plan.trainer import CONTEXT_GIB, GIB

# Share of a GPU for vLLM. The rest is for the buffers of a weight transfer, 2 GiB with TRL's client.
GPU_SHARE = 0.9
MAX_NUM_BATCHED_TOKENS = 8192
# CUDA graphs.
_GRAPHS_GIB = 1.0
# Float32 logits, their log-probabilities, and what sampling sorts.
_LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """GiB on each GPU of a replica."""

    share: float
    """The engine's share of the GPU."""
    weights: float
    activations: float
    graphs: float
    kv_cache: float
    """The rest; negative where the model does not fit."""
    kv_tokens: float
    """Tokens that the KV cache of the replica holds, or of each of its data parallel ranks."""

    def sequences(self, tokens: float) -> int:
        """Sequences of so many tokens that it holds."""
        return max(0, int(self.kv_tokens / tokens))


def engine_memory(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    max_num_seqs: int,
    length: float = 0,
    *,
    data_parallel: int = 1,
    share: float = GPU_SHARE,
) -> EngineMemory:
    """The memory of one replica that takes `share` of each of its GPUs, with sequences of `length` tokens."""
    weights = shape.bytes_on_gpu(tensor_parallel, data_parallel) / GIB
    width = 2 * shape.intermediate / tensor_parallel + 6 * shape.hidden
    logits = max_num_seqs * shape.vocabulary * 4 * _LOGIT_COPIES
    activations = (MAX_NUM_BATCHED_TOKENS * width * 2 + logits) / GIB
    kv_cache = gpu.memory_gib * share - weights - activations - _GRAPHS_GIB - CONTEXT_GIB
    return EngineMemory(
        share=share,
        weights=weights,
        activations=activations,
        graphs=_GRAPHS_GIB + CONTEXT_GIB,
        kv_cache=kv_cache,
        kv_tokens=max(0.0, kv_cache * GIB / shape.kv_bytes(tensor_parallel, length)),
    )
