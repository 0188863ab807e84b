"""The memory and the time of a trainer: full parameters or LoRA, with offload, sequence parallelism, chunked logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tuning.plan.gpu import Gpu
from tuning.plan.shape import ModelShape
from tuning.plan.workload import StepWorkload

GIB = float(2**30)
# CUDA's context and NCCL's buffers.
CONTEXT_GIB = 1.5
# AdamW in mixed precision: bfloat16 weights, bfloat16 gradients, float32 weights and two moments, sharded over all GPUs
# (FSDP2, ZeRO-3, Megatron's distributed optimizer).
_WEIGHT, _GRADIENT, _OPTIMIZER = 2, 2, 12
# Logits of a micro batch in float32, and their gradient; chunked logits exist for so many tokens at a time.
_LOGIT_BYTES = 8
_CHUNK = 2048
_SHARE = 0.92
_SEQUENCE_PARALLEL = (1, 2, 4, 8)
# FLOPs a parameter and token: forward, backward to activations and to weights, forward again for gradient
# checkpointing. LoRA leaves out the gradients of weights.
_FULL_FLOPS, _LORA_FLOPS = 8, 6
# To the host and back: PCIe 4 as copies reach it, and Adam on the CPUs of a node. Assumed, not measured.
_HOST_BYTES_PER_S = 20e9
_HOST_ADAM_PER_S = 4e9
_PASSES = 3  # forward, recomputed, backward: each gathers weights that are on the host


class Offload(StrEnum):
    """The part of a trainer's state that is on the host while it trains."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """The optimizer's: Megatron's optimizer_cpu_offload, DeepSpeed's ZeRO-Offload."""
    ALL = "all"
    """Weights and gradients too, a layer at a time on the GPU: FSDP2's offload_policy, ZeRO-3 offload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One way to train on `gpus` GPUs. `lora_rank` 0 trains all parameters."""

    shape: ModelShape
    gpus: int
    lora_rank: int = 0
    offload: Offload = Offload.NONE
    sequence_parallel: int = 1
    """GPUs that share a sequence (Ulysses, context parallelism)."""
    chunked_logits: bool = False
    """Logits of a chunk of tokens at a time: fused linear cross entropy (Liger, verl's use_fused_kernels)."""

    @property
    def groups(self) -> int:
        """Groups of GPUs that take sequences of their own."""
        return self.gpus // self.sequence_parallel

    @property
    def trained(self) -> float:
        """Parameters that an optimizer updates."""
        return self.shape.lora_parameters(self.lora_rank) if self.lora_rank else self.shape.parameters

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer on all GPUs together, without offload."""
        frozen = self.shape.parameters * _WEIGHT if self.lora_rank else 0.0
        return frozen + self.trained * (_WEIGHT + _GRADIENT + _OPTIMIZER)

    @property
    def held_gib(self) -> float:
        """GiB of state on each GPU while it trains, and the layer that is gathered for a computation."""
        host = {Offload.NONE: 0.0, Offload.OPTIMIZER: self.trained * _OPTIMIZER, Offload.ALL: self.state_bytes}
        gathered = self.shape.parameters / self.shape.layers * _WEIGHT if self.gpus > 1 or self._is_on_host else 0.0
        return ((self.state_bytes - host[self.offload]) / self.gpus + gathered) / GIB

    @property
    def resident_gib(self) -> float:
        """GiB of state on each GPU between two steps, where a colocated engine runs."""
        held = {Offload.NONE: self.state_bytes, Offload.OPTIMIZER: self.state_bytes - self.trained * _OPTIMIZER}
        return held.get(self.offload, 0.0) / self.gpus / GIB

    @property
    def _is_on_host(self) -> bool:
        return self.offload is Offload.ALL

    def gib(self, work: StepWorkload, sequences: int) -> float:
        """GiB on each GPU with micro batches of so many sequences of full length and gradient checkpointing."""
        tokens, shape = sequences * work.longest / self.sequence_parallel, self.shape
        checkpoints = tokens * shape.hidden * shape.layers * 2
        one_layer = tokens * (8 * shape.hidden + 3 * shape.intermediate) * 2
        logits = (min(tokens, _CHUNK) if self.chunked_logits else tokens) * shape.vocabulary * _LOGIT_BYTES
        return self.held_gib + (checkpoints + one_layer + logits) / GIB + CONTEXT_GIB

    def largest_micro_batch(self, gpu: Gpu, work: StepWorkload) -> int:
        """Sequences of a micro batch of each group of GPUs; 0 where not even one fits."""
        room = gpu.memory_gib * _SHARE
        if self.gib(work, 1) > room:
            return 0
        # Chunked logits do not grow with the second sequence.
        each = self.gib(work, 3) - self.gib(work, 2)
        return 1 + max(0, int((room - self.gib(work, 1)) / each))

    def seconds(self, gpu: Gpu, work: StepWorkload, mfu: float, gpus_per_node: int) -> float:
        """Seconds of one pass over the completions of a step, with transfers to the host."""
        tokens = work.completions * (work.prompt.mean + work.response.mean)
        flops = (_LORA_FLOPS if self.lora_rank else _FULL_FLOPS) * self.shape.active_parameters * tokens
        return flops / (self.gpus * gpu.tflops * 1e12 * mfu) + self._host_s(gpu, work, gpus_per_node)

    def _host_s(self, gpu: Gpu, work: StepWorkload, gpus_per_node: int) -> float:
        if self.offload is Offload.NONE:
            return 0.0
        nodes = max(1, self.gpus // gpus_per_node)
        moved = self.trained * (_WEIGHT + _GRADIENT)
        if self._is_on_host:
            micro_batches = -(-work.completions // (self.groups * max(1, self.largest_micro_batch(gpu, work))))
            moved += micro_batches * (self.shape.parameters * _WEIGHT * _PASSES + self.trained * _GRADIENT)
        return moved / self.gpus / _HOST_BYTES_PER_S + self.trained / nodes / _HOST_ADAM_PER_S

    @property
    def parking_s(self) -> float:
        """Seconds to bring the state to the host and back, around the work of a colocated engine."""
        return 2 * self.resident_gib * GIB / _HOST_BYTES_PER_S

    def __str__(self) -> str:
        parts = [f"LoRA {self.lora_rank}" if self.lora_rank else ""]
        parts += [f"SP {self.sequence_parallel}" if self.sequence_parallel > 1 else ""]
        parts += ["chunked logits" if self.chunked_logits else ""]
        parts += [f"offload {self.offload}" if self.offload is not Offload.NONE else ""]
        return ", ".join(part for part in parts if part) or "plain"


def cheapest_training(
    shape: ModelShape, gpu: Gpu, gpus: int, work: StepWorkload, *, lora_rank: int = 0, gpus_per_node: int = 8
) -> Training | None:
    """Return the way to train that fits and costs least: without a device if it can be, then chunked logits, then
    sequence parallelism, then offload of the optimizer, then of all. None where none fits."""
    ways = _ways(shape, gpus, lora_rank, gpus_per_node)
    return next((training for training in ways if training.largest_micro_batch(gpu, work)), None)


def _ways(shape: ModelShape, gpus: int, lora_rank: int, gpus_per_node: int) -> Iterator[Training]:
    for offload in Offload:
        for shards in _SEQUENCE_PARALLEL:
            if gpus % shards or shards > gpus_per_node or shape.heads % shards:
                continue
            for chunked in (False, True):
                yield Training(
                    shape=shape,
                    gpus=gpus,
                    lora_rank=lora_rank,
                    offload=offload,
                    sequence_parallel=shards,
                    chunked_logits=chunked,
                )
