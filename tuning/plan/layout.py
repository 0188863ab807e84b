"""The GPUs of trainer and engines, with the parallelism of each engine, as far as memory goes."""

from collections.abc import Iterator
from dataclasses import dataclass

from tuning.plan.memory import GPU_SHARE, EngineMemory, engine_memory
from tuning.plan.question import Question
from tuning.plan.trainer import Training

_SIZES = (1, 2, 4, 8, 16, 32)
# Nodes whose splits between trainer and engines are tried GPU by GPU; more nodes are dealt out whole.
_SPLIT_NODES = 2
_MOST_SPLITS = 16
_FEWEST_SEQUENCES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`training` is None without a trainer. `is_parked` is True where a colocated trainer's state goes to the host
    while engines run; `resident_gib` stays on each GPU beside them."""

    trainer_gpus: int
    training: Training | None
    is_colocated: bool
    is_parked: bool
    tensor_parallel: int
    data_parallel: int
    """Ranks of a replica with attention of their own, which share the routed experts (expert parallelism)."""
    replicas: int

    def spans_nodes(self, gpus: int) -> bool:
        """True if an engine needs more than the `gpus` of a node: Ray Serve places a replica on one, so that such an
        engine is a server of its own (`kind: external`), or the trainer's."""
        return self.gpus_of_replica > gpus

    @property
    def gpus_of_replica(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def resident_gib(self) -> float:
        stays = self.is_colocated and not self.is_parked and self.training
        return self.training.resident_gib if stays and self.training else 0.0

    @property
    def parking_s(self) -> float:
        return self.training.parking_s if self.is_parked and self.training else 0.0

    def engine_memory(self, question: Question, max_num_seqs: int) -> EngineMemory:
        share = GPU_SHARE - self.resident_gib / question.gpu.memory_gib
        return engine_memory(
            question.shape,
            question.gpu,
            self.tensor_parallel,
            max_num_seqs,
            question.work.longest,
            data_parallel=self.data_parallel,
            share=round(share, 2),
        )


def layouts(question: Question) -> Iterator[Layout]:
    """Yield every layout whose trainer fits, and whose engines hold one sequence of full length."""
    for trainer_gpus, training in _trainers(question):
        for tensor_parallel, data_parallel in _engines(question):
            replicas = _replicas(question, trainer_gpus, tensor_parallel * data_parallel)
            for is_parked in (False, True) if question.is_colocated else (False,):
                layout = Layout(
                    trainer_gpus=trainer_gpus,
                    training=training,
                    is_colocated=question.is_colocated,
                    is_parked=is_parked,
                    tensor_parallel=tensor_parallel,
                    data_parallel=data_parallel,
                    replicas=min(replicas, question.work.prompts),
                )
                if replicas and _holds_a_sequence(question, layout):
                    yield layout


def trains(question: Question) -> bool:
    """True if training fits any split, or is not planned."""
    return next(_trainers(question), None) is not None


def _trainers(question: Question) -> Iterator[tuple[int, Training | None]]:
    for gpus in _splits(question):
        training = question.training(gpus) if gpus else None
        if training or not gpus:
            yield gpus, training


def _splits(question: Question) -> Iterator[int]:
    """GPUs for training."""
    if question.is_colocated:
        yield question.all_gpus
    elif question.trainer_gpus is not None:
        yield question.trainer_gpus
    elif question.all_gpus == 1:
        yield 0
    else:
        nodes = max(1, question.nodes // _MOST_SPLITS)
        step = 1 if question.nodes <= _SPLIT_NODES else question.gpus * nodes
        yield from range(step, question.all_gpus, step)


def _engines(question: Question) -> Iterator[tuple[int, int]]:
    """Tensor and data parallel sizes. Data parallel attention pays where experts are shared out; copies of a dense
    model are replicas."""
    most, experts = question.all_gpus, question.shape.experts
    for size in _SIZES:
        if size > question.gpus and size % question.gpus:
            continue
        if size <= most and question.shape.splits_into(size):
            yield size, 1
        # An engine with adapters has no ranks.
        if 1 < size <= most and experts and experts.count % size == 0 and not question.lora_rank:
            yield 1, size


def _replicas(question: Question, trainer_gpus: int, size: int) -> int:
    """Engines of so many GPUs on the GPUs that the trainer leaves, none of them on two nodes unless it is larger than
    one."""
    free = question.all_gpus - (0 if question.is_colocated else trainer_gpus)
    nodes, rest = divmod(free, question.gpus)
    if size > question.gpus:
        return nodes // (size // question.gpus)
    return nodes * (question.gpus // size) + rest // size


def _holds_a_sequence(question: Question, layout: Layout) -> bool:
    return layout.engine_memory(question, _FEWEST_SEQUENCES).sequences(question.work.longest) >= 1
