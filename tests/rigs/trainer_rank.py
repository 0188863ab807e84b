"""A trainer of two ranks, which push one model after another, sharded in all ways: for test_sharded_models.py.

    python -m tests.rigs.trainer_rank FOLDER URL GROUP_URL

Each rank writes one JSON object a case, into the file FOLDER/rank-RANK. In FOLDER the ranks find each other, and rank 0
the weight store of the gateway at URL; engines behind GROUP_URL receive over gloo.
"""

import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # what compiles loads it, here for all ranks at once
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engines.errors import DeadlineExceeded
from engines.process.port import free_port
from tests.material.sharded_model import SHAPES, WORLD_SIZE, Model
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client.transports import ranks, tensors
from trainer_client.transports.tensors import Entry

TIMEOUT_S = 20.0
SHORT_S = 2.0


class Trainer:
    """This rank, with its mesh."""

    def __init__(self, rank: int, folder: Path, url: str, group_url: str) -> None:
        self.rank = rank
        self.store = folder / "store"
        self.told = folder / f"rank-{rank}"
        self.url = url
        self.group_url = group_url
        self.begin("ranks")

    def begin(self, place: str) -> None:
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", self._port(self.told.parent / place), WORLD_SIZE, self.rank == 0, limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD_SIZE, timeout=limit)
        self.mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        self.mesh_of_parts = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("part", "shard"))

    def _port(self, place: Path) -> int:
        """A free port, which the first rank writes into the file `place`."""
        if self.rank == 0:
            place.with_suffix(".new").write_text(str(free_port()))
            place.with_suffix(".new").rename(place)
        while not place.exists():
            time.sleep(0.01)
        return int(place.read_text())

    def run(self, case: Callable[["Trainer"], Any]) -> None:
        told = {"case": case.__name__}
        try:
            told |= case(self)
        except Exception as error:
            told |= {"error": type(error).__name__, "message": str(error)}
        with self.told.open("a") as lines:
            print(json.dumps(told), file=lines)

    def push(self, model: Any, expected: nn.Module | None = None, **options: Any) -> dict[str, Any]:
        """The result: the version, and on rank 0 True if the store then equals `expected`."""
        with self.sender(**options) as sender:
            version = sender.push(model)
        dist.barrier()
        return {"version": version} | (self.stored(version, expected or Model()) if self.rank == 0 else {})

    @contextmanager
    def sender(self, timeout_s: float = TIMEOUT_S, **options: Any) -> Iterator[WeightSender]:
        """A sender into the store."""
        with (
            BlockingRolloutClient(self.url, attempts=1) as client,
            WeightSender(client, transport="store", timeout_s=timeout_s, **options) as sender,
        ):
            yield sender

    def stored(self, version: int, expected: nn.Module) -> dict[str, Any]:
        held: dict[str, torch.Tensor] = {}
        for file in (self.store / f"v{version}").glob("*.safetensors"):
            held |= load_file(file)
        wanted = {name: tensor for name, tensor in expected.state_dict().items() if name in SHAPES}
        same = all(torch.equal(held[name], tensor.to(held[name].dtype)) for name, tensor in wanted.items())
        return {"same": same, "names": sorted(held), "dtypes": sorted({str(tensor.dtype) for tensor in held.values()})}


def fsdp2(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(sharded(trainer, Model()))


def fsdp2_after_a_step(trainer: Trainer) -> dict[str, Any]:
    """The root's parameters stay gathered after a forward pass."""
    model = sharded(trainer, Model())
    model(torch.tensor([[1, 2]]))
    return trainer.push(model)


def fsdp2_on_a_mesh_of_two_dimensions(trainer: Trainer) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("replicate", "shard"))
    return trainer.push(fully_shard(Model(), mesh=mesh))


def through_a_group(trainer: Trainer) -> dict[str, Any]:
    with BlockingRolloutClient(trainer.group_url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        return {"version": sender.push(sharded(trainer, Model(seed=4)))}


def through_a_group_that_refuses(trainer: Trainer) -> dict[str, Any]:
    with BlockingRolloutClient(trainer.group_url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        return {"version": sender.push(sharded(trainer, Model(seed=5)), version=6)}


def fsdp2_in_bfloat16(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(sharded(trainer, Model(seed=2)), Model(seed=2), dtype=torch.bfloat16)


def fsdp1(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(flat(Model()))


def fsdp1_as_its_full_state(trainer: Trainer) -> dict[str, Any]:
    state = get_model_state_dict(flat(Model()), options=StateDictOptions(full_state_dict=True))
    if trainer.rank == 0:
        return trainer.push({name: state[name] for name in SHAPES})
    dist.barrier()
    return {}


def tensor_parallel(trainer: Trainer) -> dict[str, Any]:
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    return trainer.push(parallelize_module(Model(), trainer.mesh, plan))


def copies_that_are_tensor_parallel(trainer: Trainer) -> dict[str, Any]:
    """Each rank is a copy; the mesh of its shards is a part of the trainer's."""
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    return trainer.push(parallelize_module(Model(), trainer.mesh_of_parts["shard"], plan))


def stages_of_a_pipeline(trainer: Trainer) -> dict[str, Any]:
    names = sorted(SHAPES)[trainer.rank :: WORLD_SIZE]
    whole, mesh = Model().state_dict(), trainer.mesh_of_parts["shard"]
    return trainer.push({name: distribute_tensor(whole[name], mesh, [Shard(0)]) for name in names})


def data_parallel(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(nn.parallel.DistributedDataParallel(Model()))


def compiled(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(torch.compile(sharded(trainer, Model())))


def dict_of_dtensors(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(distributed(trainer))


def dict_of_a_models_state(trainer: Trainer) -> dict[str, Any]:
    state = sharded(trainer, Model()).state_dict()
    del state["steps"]
    return trainer.push(state)


def iterator_of_dtensors(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(iter(distributed(trainer).items()))


def one_tensor_at_a_time(trainer: Trainer) -> dict[str, Any]:
    gathered: list[int] = []
    gather = ranks.TrainerRanks.gather

    def counted(of: Any, run: Any) -> Any:
        gathered.append(len(run))
        return gather(of, run)

    with patch.object(ranks, "_RUN_BYTES", 1), patch.object(ranks.TrainerRanks, "gather", counted):
        return trainer.push(sharded(trainer, Model())) | {"gathered": gathered}


def delta(trainer: Trainer) -> dict[str, Any]:
    """A tensor has changed on the second rank alone."""
    model = sharded(trainer, Model())
    with trainer.sender(delta=True) as sender:
        sender.push(model)
        if trainer.rank == 1:
            with torch.no_grad():
                model.layers[1].weight.to_local().add_(1.0)
        version = sender.push(model)
    dist.barrier()
    expected = Model()
    with torch.no_grad():
        expected.layers[1].weight[2:] += 1.0
    return {"version": version} | (trainer.stored(version, expected) if trainer.rank == 0 else {})


def other_shapes(trainer: Trainer) -> dict[str, Any]:
    model = Model()
    model.layers[1] = nn.Linear(6, 5)
    return trainer.push(sharded(trainer, model))


def ranks_that_differ(trainer: Trainer) -> dict[str, Any]:
    named = distributed(trainer)
    if trainer.rank == 1:
        del named["layers.1.bias"]
    return trainer.push(named)


def ranks_that_shard_differently(trainer: Trainer) -> dict[str, Any]:
    named = distributed(trainer)
    if trainer.rank == 1:
        half = torch.zeros(4, 6 // WORLD_SIZE)
        named["layers.1.weight"] = DTensor.from_local(half, trainer.mesh, [Shard(1)], run_check=False)
    return trainer.push(named)


def ranks_of_which_one_has_tensors_left(trainer: Trainer) -> dict[str, Any]:
    """Each tensor is a part."""
    named = list(distributed(trainer).items())
    with patch.object(tensors, "PART_BYTES", 1):
        return trainer.push(iter(named if trainer.rank == 1 else named[:-1]))


def shards_without_values(trainer: Trainer) -> dict[str, Any]:
    with torch.device("meta"):
        model = sharded(trainer, Model())
    return trainer.push(model)


class Gone(BaseException):
    """The end of a rank."""


def a_rank_that_leaves_before_the_outcome(trainer: Trainer) -> dict[str, Any]:
    named = distributed(trainer)
    told: dict[str, Any] = {}
    with trainer.sender(SHORT_S) as sender:
        follow = ranks.TrainerRanks._follow

        def leaving(of: Any, parts: Any) -> None:
            follow(of, parts)
            raise Gone

        with suppress(Gone), patch.object(ranks.TrainerRanks, "_follow", leaving):
            told["version"] = sender.push(named)
        dist.barrier()
        told["next"] = sender.push(named)
        return told


def a_rank_that_missed_a_push(trainer: Trainer) -> dict[str, Any]:
    """The sender's push fails for want of the other rank, and counts for neither."""
    named = distributed(trainer)
    errors = []
    with trainer.sender(SHORT_S) as sender:
        for attempt in range(2):
            if (attempt, trainer.rank) != (0, 1):
                try:
                    version = sender.push(named)
                except DeadlineExceeded as error:
                    errors.append(str(error))
            dist.barrier()
        return {"version": version, "errors": errors}


def a_gateway_that_takes_longer_than_a_silence(trainer: Trainer) -> dict[str, Any]:
    """As for a rolling update of many replicas."""
    load = BlockingRolloutClient.load_weights

    def loading(*args: Any) -> int:
        time.sleep(1.5 * SHORT_S)
        return load(*args)

    with (
        trainer.sender(SHORT_S) as sender,
        patch.object(BlockingRolloutClient, "load_weights", loading),
        patch.object(ranks, "_WAITS_BETWEEN_WORDS", 1),
    ):
        return {"version": sender.push(distributed(trainer))}


def a_rank_that_fails_at_the_last_tensor(trainer: Trainer) -> dict[str, Any]:
    with failing_at(trainer, list(SHAPES)[-1], RuntimeError("no memory"), rank=1):
        return trainer.push(distributed(trainer))


def all_ranks_that_fail_among_the_tensors(trainer: Trainer) -> dict[str, Any]:
    with failing_at(trainer, "layers.0.bias", RuntimeError("no memory")):
        return trainer.push(distributed(trainer))


def in_inference_mode(trainer: Trainer) -> dict[str, Any]:
    model = sharded(trainer, Model())
    with torch.inference_mode():
        return trainer.push(model)


@contextmanager
def failing_at(trainer: Trainer, name: str, error: BaseException, *, rank: int | None = None) -> Iterator[None]:
    """Let this tensor's gathering end with an error, on one rank or on all."""
    made = Entry.made

    def failing(entry: Entry) -> Any:
        tensor = made(entry)
        if entry.name == name and rank in (None, trainer.rank):
            raise error
        return tensor

    with patch.object(Entry, "made", failing):
        yield


def after_a_new_start_of_torch_distributed(trainer: Trainer) -> dict[str, Any]:
    """The sender is that of the ranks before."""
    with trainer.sender() as sender:
        sender.push(distributed(trainer))
        dist.barrier()
        dist.destroy_process_group()
        trainer.begin("ranks-again")
        return {"version": sender.push(distributed(trainer))}


def after_all_that(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(sharded(trainer, Model(seed=3)), Model(seed=3))


def a_sender_that_stays_away(trainer: Trainer) -> dict[str, Any]:
    with (
        trainer.sender(SHORT_S) as sender,
        patch.object(ranks, "_WAITS_BETWEEN_WORDS", 1),
    ):
        named, given_up = distributed(trainer), trainer.store.parent / "given-up"
        if trainer.rank == 0:
            deadline = time.monotonic() + TIMEOUT_S
            while not given_up.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            return {}
        try:
            return {"version": sender.push(named)}
        finally:
            given_up.touch()


def sharded(trainer: Trainer, model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=trainer.mesh)
    return fully_shard(model, mesh=trainer.mesh)


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in list(model.layers),
        use_orig_params=True,
    )


def distributed(trainer: Trainer) -> dict[str, DTensor]:
    whole = Model().state_dict()
    return {name: distribute_tensor(whole[name], trainer.mesh, [Shard(0)]) for name in SHAPES}


CASES = (
    fsdp2,
    fsdp2_after_a_step,
    fsdp2_on_a_mesh_of_two_dimensions,
    fsdp2_in_bfloat16,
    fsdp1,
    fsdp1_as_its_full_state,
    tensor_parallel,
    copies_that_are_tensor_parallel,
    data_parallel,
    compiled,
    dict_of_dtensors,
    dict_of_a_models_state,
    iterator_of_dtensors,
    in_inference_mode,
    one_tensor_at_a_time,
    a_gateway_that_takes_longer_than_a_silence,
    delta,
    through_a_group,
    through_a_group_that_refuses,
    other_shapes,
    ranks_that_differ,
    ranks_that_shard_differently,
    stages_of_a_pipeline,
    ranks_of_which_one_has_tensors_left,
    shards_without_values,
    a_rank_that_fails_at_the_last_tensor,
    all_ranks_that_fail_among_the_tensors,
    after_all_that,
    after_a_new_start_of_torch_distributed,
    a_rank_that_leaves_before_the_outcome,
    a_rank_that_missed_a_push,
    a_sender_that_stays_away,
)


def run_rank(rank: int, folder: Path, *urls: str) -> None:
    warnings.simplefilter("ignore")
    trainer = Trainer(rank, folder, *urls)
    for case in CASES:
        trainer.run(case)
    dist.destroy_process_group()


def main() -> int:
    """0 where all ranks came to their end. They are forks of this process: what they import takes seconds to load."""
    folder, *urls = sys.argv[1:]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank, Path(folder), *urls)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
