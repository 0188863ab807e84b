"""The question that a plan answers."""

import math
from dataclasses import dataclass

from engines.errors import UsageError
from tuning.plan.gpu import Gpu
from tuning.plan.shape import ModelShape
from tuning.plan.speed import Speeds
from tuning.plan.trainer import Training, cheapest_training
from tuning.plan.workload import StepWorkload

# GPUs of the largest machines with links between all of them, and nodes of the largest published runs.
_MOST_GPUS, _MOST_NODES = 72, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`gpus` are those of each of `nodes` nodes. `trainer_gpus` None tries every split; `is_colocated` has trainer and
    engines take turns on all GPUs; `mfu` is the share
    of the GPU's FLOP/s that training reaches, which nothing here has measured."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    nodes: int = 1
    work: StepWorkload
    speeds: Speeds
    trainer_gpus: int | None = None
    is_colocated: bool = False
    lora_rank: int = 0
    mfu: float = 0.4
    cpu_factor: float = 1.0

    def __post_init__(self) -> None:
        for option, count, most in (("--gpus", self.gpus, _MOST_GPUS), ("--nodes", self.nodes, _MOST_NODES)):
            if not 1 <= count <= most:
                raise UsageError(f"{option} {count}: from 1 to {most}")
        if self.trainer_gpus is not None and not 0 <= self.trainer_gpus < self.all_gpus:
            raise UsageError(
                f"--trainer-gpus {self.trainer_gpus}: from 0 (somebody else trains) to {self.all_gpus - 1}, which "
                "leaves one to the engines"
            )
        if self.lora_rank < 0:
            raise UsageError(f"--lora {self.lora_rank}: a rank of at least 1, or 0 to train all parameters")
        if self.is_colocated and self.trainer_gpus is not None:
            raise UsageError("--trainer-gpus with --colocated: they take turns on all GPUs; leave one out")
        if not 0 < self.mfu <= 1:
            raise UsageError(f"--mfu {self.mfu:g}: above 0 and at most 1")
        if not 0 < self.cpu_factor < math.inf:
            raise UsageError(f"--cpu-factor {self.cpu_factor:g}: above 0")

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.nodes

    def training(self, gpus: int) -> Training | None:
        """Return the cheapest way to train on so many GPUs; None where none fits."""
        return cheapest_training(
            self.shape, self.gpu, gpus, self.work, lora_rank=self.lora_rank, gpus_per_node=self.gpus
        )
