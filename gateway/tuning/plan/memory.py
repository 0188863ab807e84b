"""The memory of a GPU in an engine and in a trainer. Estimates: engines measure their own at start."""

from dataclasses import dataclass

from gateway.tuning.plan.gpu import Gpu
from gateway.tuning.plan.shape import ModelShape
from gateway.tuning.plan.workload import StepWorkload

GIB = float(2**30)
# Share of a GPU for vLLM. The rest is for the buffers of a weight transfer, 2 GiB with TRL's client.
GPU_SHARE = 0.9
MAX_NUM_BATCHED_TOKENS = 8192
# CUDA's context and NCCL's buffers; CUDA graphs.
_CONTEXT_GIB = 1.5
_GRAPHS_GIB = 1.0
# Float32 logits, their log-probabilities, and what sampling sorts.
_LOGIT_COPIES = 3

# AdamW in mixed precision: bfloat16 weights and gradients, float32 weights and two moments, sharded over all GPUs
# (FSDP2, ZeRO-3).
_TRAINER_BYTES = 2 + 2 + 12
# Logits of a micro batch in float32, and their gradient.
_LOGIT_BYTES = 8
_TRAINER_SHARE = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """GiB on each GPU of a replica."""

    weights: float
    activations: float
    graphs: float
    kv_cache: float
    """The rest; negative where the model does not fit."""
    kv_tokens: float
    """Tokens that the KV cache of the replica holds."""

    def sequences(self, tokens: float) -> int:
        """Sequences of so many tokens that it holds."""
        return max(0, int(self.kv_tokens / tokens))


def engine_memory(
    shape: ModelShape, gpu: Gpu, tensor_parallel: int, max_num_seqs: int, length: float = 0
) -> EngineMemory:
    """The memory of one replica that takes `GPU_SHARE` of each of its GPUs, with sequences of `length` tokens."""
    weights = shape.weight_bytes / tensor_parallel / GIB
    width = 2 * shape.intermediate / tensor_parallel + 6 * shape.hidden
    logits = max_num_seqs * shape.vocabulary * 4 * _LOGIT_COPIES
    activations = (MAX_NUM_BATCHED_TOKENS * width * 2 + logits) / GIB
    kv_cache = gpu.memory_gib * GPU_SHARE - weights - activations - _GRAPHS_GIB - _CONTEXT_GIB
    return EngineMemory(
        weights=weights,
        activations=activations,
        graphs=_GRAPHS_GIB + _CONTEXT_GIB,
        kv_cache=kv_cache,
        kv_tokens=max(0.0, kv_cache * GIB / shape.kv_bytes(tensor_parallel, length)),
    )


def trainer_gib(shape: ModelShape, gpus: int, work: StepWorkload, sequences: int) -> float:
    """GiB on each of `gpus` GPUs that train all parameters, with micro batches of so many sequences of full length and
    gradient checkpointing."""
    tokens = sequences * work.longest
    state = shape.parameters * _TRAINER_BYTES / gpus
    checkpoints = tokens * shape.hidden * shape.layers * 2
    one_layer = tokens * (8 * shape.hidden + 3 * shape.intermediate) * 2
    return (state + checkpoints + one_layer + tokens * shape.vocabulary * _LOGIT_BYTES) / GIB + _CONTEXT_GIB


def largest_micro_batch(shape: ModelShape, gpu: Gpu, gpus: int, work: StepWorkload) -> int:
    """Sequences of a micro batch on each training GPU; 0 where not even one fits."""
    room = gpu.memory_gib * _TRAINER_SHARE
    if trainer_gib(shape, gpus, work, 1) > room:
        return 0
    each = trainer_gib(shape, gpus, work, 2) - trainer_gib(shape, gpus, work, 1)
    return 1 + int((room - trainer_gib(shape, gpus, work, 1)) / each)
