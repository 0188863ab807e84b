"""The speed and the room of a modelled engine: of a simulated engine from its configuration, else fitted to GPUs."""

from dataclasses import dataclass
from typing import Protocol

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind
from tuning.plan.gpu import Gpu
from tuning.plan.memory import GPU_SHARE, engine_memory
from tuning.plan.shape import ModelShape
from tuning.plan.speed import LARGEST_GRAPH, EngineModel, fitted, overlapped


class Speed(Protocol):
    """`context` is the sum of the tokens that a step's sequences look at."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...

    def step_s(self, sequences: float, context: float) -> float:
        """Return the seconds of a decode step."""

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds to read the tokens from `start` to `end` of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSpeed:
    """A step costs `base_s`, each sequence in it `sequence_s`, each token that it looks at `context_s`."""

    max_num_seqs: int
    kv_tokens: int
    base_s: float
    sequence_s: float
    context_s: float
    prefill_token_s: float

    def step_s(self, sequences: float, context: float) -> float:
        return self.base_s + self.sequence_s * sequences + self.context_s * context

    def prefill_s(self, start: int, end: int) -> float:
        return self.prefill_token_s * (end - start)


@dataclass(frozen=True, slots=True)
class FittedSpeed:
    """The roofline of `plan`, and an API process beside it that turns tokens into replies."""

    engine: EngineModel

    @property
    def max_num_seqs(self) -> int:
        return self.engine.max_num_seqs

    @property
    def kv_tokens(self) -> int:
        return int(self.engine.kv_tokens)

    def step_s(self, sequences: float, context: float) -> float:
        return overlapped(self.engine.step_s(sequences, context), self.engine.api_s(0, sequences))

    def prefill_s(self, start: int, end: int) -> float:
        return self.engine.prefill_s(end) - self.engine.prefill_s(start)


def speed_of(name: str, engine: EngineConfig, gpu: Gpu, shape: ModelShape | None, kv_read_s: float) -> Speed:
    """Return the speed of an engine group's replicas. Raise `ConfigError` where it cannot be known.

    `kv_read_s` is of simulated engines, whose configuration lacks it.
    """
    if engine.kind is EngineKind.SIM:
        sim = engine.sim
        return SetSpeed(
            max_num_seqs=engine.max_num_seqs,
            kv_tokens=sim.kv_tokens,
            base_s=sim.decode_step_s - sim.decode_step_per_seq_s,
            sequence_s=sim.decode_step_per_seq_s,
            context_s=kv_read_s,
            prefill_token_s=1 / sim.prefill_tokens_per_s,
        )
    if shape is None:
        raise ConfigError(
            f"engines.{name}.model = {engine.model!r}: the speed of kind: {engine.kind} follows from the model's "
            "config.json, which is not here: give its numbers with --shape, as to `rollout-gateway plan`"
        )
    share = engine.gpu_memory_utilization or GPU_SHARE
    tensor_parallel, sequences = engine.tensor_parallel_size, engine.max_num_seqs
    memory = engine_memory(shape, gpu, tensor_parallel, sequences, share=share)
    if memory.kv_tokens <= 0:
        raise ConfigError(
            f"engines.{name}: {shape.name} leaves no room for a KV cache on {gpu.name}: give a larger --gpu"
        )
    return FittedSpeed(
        EngineModel(
            shape=shape,
            gpu=gpu,
            tensor_parallel=tensor_parallel,
            max_num_seqs=sequences,
            kv_tokens=memory.kv_tokens,
            api_servers=engine.api_server_count or 1,
            graph_seqs=0 if engine.enforce_eager else engine.max_cudagraph_capture_size or LARGEST_GRAPH,
            speeds=fitted(),
        )
    )
