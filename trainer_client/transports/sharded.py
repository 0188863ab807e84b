"""Sharded tensors: DTensor (FSDP2, tensor parallel) and FSDP's ShardedTensor."""

import warnings
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Return True if the tensor must be gathered from ranks."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards")


def holders_of(tensor: Any) -> tuple[int, ...]:
    """Return the ranks that hold its shards."""
    if hasattr(tensor, "full_tensor"):
        return tuple(tensor.device_mesh.mesh.flatten().tolist())
    return tuple(torch.distributed.get_process_group_ranks(tensor._process_group))


def ranks_of(tensor: Any) -> tuple[int, ...]:
    """Return the ranks of the trainer that holds it.

    A mesh may be a part of another. The other's ranks hold copies of the tensor, or other stages of a pipeline.
    """
    if hasattr(tensor, "full_tensor"):
        return tuple(_root_of(tensor.device_mesh).mesh.flatten().tolist())
    return holders_of(tensor)


def placed(tensor: Any) -> str:
    """Return how its shards are placed, alike on all ranks."""
    return str(getattr(tensor, "placements", ""))


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def shape_of(tensor: Any) -> list[int]:
    """Return the shape of the whole tensor."""
    return list(tensor.size())


def parts_here(tensor: Any) -> list[torch.Tensor]:
    """Return this process's shards."""
    if hasattr(tensor, "full_tensor"):
        return [tensor.to_local()]
    return [shard.tensor for shard in tensor.local_shards()] if is_sharded(tensor) else [tensor]


def gathered(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather the whole tensor in `dtype`: a DTensor on every rank, a ShardedTensor on the first, None on the others.

    Each rank casts its shard first: this halves the traffic of a float32 trainer that sends bfloat16.
    """
    if hasattr(tensor, "full_tensor"):
        part = tensor.detach().to(dtype)
        if part.device.type != part.device_mesh.device_type:
            part = part.to(part.device_mesh.device_type)  # offloaded to the host, where there is no group
        return part.full_tensor()
    return _sent_to_the_first(tensor, dtype)


def _sent_to_the_first(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    whole = None
    if torch.distributed.get_rank(tensor._process_group) == 0:
        whole = torch.empty(tensor.size(), dtype=dtype, device=tensor._get_preferred_device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated class, rank without a shard
        tensor.gather(0, whole, dtype=dtype)
    return whole
