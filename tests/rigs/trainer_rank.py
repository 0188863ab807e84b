"""One rank of a trainer of two, which push models sharded in all ways: for test_sharded_models.py.

    python -m tests.rigs.trainer_rank RANK FOLDER URL

Prints one JSON object a case. FOLDER is where the ranks meet, and has the weight store of the gateway at URL.
"""

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.material.sharded_model import SHAPES, WORLD_SIZE, Model
from tests.rigs.gathering import pushed
from trainer_client import BlockingRolloutClient, WeightSender

TIMEOUT_S = 20.0


def fsdp2(mesh: Any) -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_after_a_step(mesh: Any) -> nn.Module:
    """The root's parameters stay gathered after a forward pass."""
    model = fsdp2(mesh)
    model(torch.tensor([[1, 2]]))
    return model


def fsdp2_on_a_mesh_of_two_dimensions(mesh: Any) -> nn.Module:
    both = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Model(), mesh=both)


def tensor_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(Model(), mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})


def data_parallel(mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Model())


def of_another_model(mesh: Any) -> nn.Module:
    """Refused; the ranks gather it all the same."""
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh=mesh)


def flat(mesh: Any) -> nn.Module:
    """FSDP of the first generation."""
    return FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)


CASES: tuple[Callable[[Any], nn.Module], ...] = (
    fsdp2, fsdp2_after_a_step, fsdp2_on_a_mesh_of_two_dimensions, tensor_parallel, data_parallel, of_another_model,
)  # fmt: skip


def told(case: Callable[[Any], nn.Module], mesh: Any, sender: WeightSender, store: Path) -> dict[str, Any]:
    """Push; on the first rank return what the store then has."""
    try:
        version = pushed(sender, case(mesh))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if version is None:
        return {}
    files = store.glob(f"v{version}-*/*.safetensors")
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = {name: tensor for name, tensor in Model().state_dict().items() if name in SHAPES}
    return {"same": all(torch.equal(held[name], tensor) for name, tensor in wanted.items()), "names": sorted(held)}


def main() -> None:
    warnings.simplefilter("ignore")
    rank, folder, url = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    limit = timedelta(seconds=60)
    meeting = dist.FileStore(str(folder / "ranks"), WORLD_SIZE)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    with (
        BlockingRolloutClient(url, attempts=1) as client,
        WeightSender(client, transport="store", timeout_s=TIMEOUT_S) as sender,
    ):
        for case in CASES:
            print(json.dumps({"case": case.__name__} | told(case, mesh, sender, folder / "store")), flush=True)
            dist.barrier()
        if rank == 0:
            for case in (fsdp2, flat):  # pushed as they are, by one rank
                try:
                    sender.push(case(mesh))
                except Exception as error:
                    print(json.dumps({"case": f"{case.__name__} as it is", "error": str(error)}), flush=True)
        else:
            for case in (fsdp2, flat):
                case(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
