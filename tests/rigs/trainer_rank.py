"""A trainer of two ranks, which push one model after another, sharded in all ways: for test_sharded_models.py.

    python -m tests.rigs.trainer_rank FOLDER URL GROUP_URL

Each rank writes one JSON object a case, into the file FOLDER/rank-RANK. FOLDER has the weight store of the gateway at
URL; engines behind GROUP_URL receive over gloo.
"""

import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engines.errors import DeadlineExceeded
from engines.process.port import free_port
from tests.material.sharded_model import SHAPES, WORLD_SIZE, Model
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client.transports import ranks
from trainer_client.transports.tensors import Entry

TIMEOUT_S = 20.0
SHORT_S = 2.0


class Trainer:
    """This rank, with its mesh."""

    def __init__(self, rank: int, port: int, folder: Path, url: str, group_url: str) -> None:
        self.rank = rank
        self.store = folder / "store"
        self.told = folder / f"rank-{rank}"
        self.url = url
        self.group_url = group_url
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, rank == 0, limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
        self.mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        self.mesh_of_parts = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("part", "shard"))

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


def dict_of_dtensors(trainer: Trainer) -> dict[str, Any]:
    return trainer.push(distributed(trainer))


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


def changed_on_one_rank(trainer: Trainer) -> dict[str, Any]:
    """A tensor has changed on the second rank alone."""
    model = sharded(trainer, Model())
    with trainer.sender() as sender:
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


def ranks_that_differ(trainer: Trainer) -> dict[str, Any]:
    named = distributed(trainer)
    if trainer.rank == 1:
        del named["layers.1.bias"]
    return trainer.push(named)


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


def a_rank_that_fails_at_the_last_tensor(trainer: Trainer) -> dict[str, Any]:
    made = Entry.made

    def failing(entry: Entry) -> Any:
        tensor = made(entry)
        if entry.name == list(SHAPES)[-1] and trainer.rank == 1:
            raise RuntimeError("no memory")
        return tensor

    with patch.object(Entry, "made", failing):
        return trainer.push(distributed(trainer))


def in_inference_mode(trainer: Trainer) -> dict[str, Any]:
    model = sharded(trainer, Model())
    with torch.inference_mode():
        return trainer.push(model)


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
    tensor_parallel,
    copies_that_are_tensor_parallel,
    data_parallel,
    dict_of_dtensors,
    iterator_of_dtensors,
    in_inference_mode,
    one_tensor_at_a_time,
    changed_on_one_rank,
    through_a_group,
    through_a_group_that_refuses,
    ranks_that_differ,
    stages_of_a_pipeline,
    a_rank_that_fails_at_the_last_tensor,
    after_all_that,
    a_rank_that_missed_a_push,
    a_sender_that_stays_away,
)


def run_rank(rank: int, port: int, folder: Path, *urls: str) -> None:
    warnings.simplefilter("ignore")
    trainer = Trainer(rank, port, folder, *urls)
    for case in CASES:
        trainer.run(case)
    dist.destroy_process_group()


def main() -> int:
    """0 where all ranks came to their end. They are forks of this process: what they import takes seconds to load."""
    folder, *urls = sys.argv[1:]
    fork, port = multiprocessing.get_context("fork"), free_port()
    processes = [fork.Process(target=run_rank, args=(rank, port, Path(folder), *urls)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
