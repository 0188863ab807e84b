"""Tensors of which each rank of the trainer has a part: DTensor (FSDP2, tensor parallel) and FSDP's ShardedTensor."""

import warnings
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Whether it takes all of its ranks to put together."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "local_shards")


def ranks_of(tensor: Any) -> tuple[int, ...]:
    """The ranks that have a part of it."""
    if hasattr(tensor, "full_tensor"):
        return tuple(tensor.device_mesh.mesh.flatten().tolist())
    return tuple(torch.distributed.get_process_group_ranks(tensor._process_group))


def shape_of(tensor: Any) -> list[int]:
    """Of the whole."""
    return list(tensor.size())


def parts_here(tensor: Any) -> list[torch.Tensor]:
    """What this process has of it."""
    if hasattr(tensor, "full_tensor"):
        return [tensor.to_local()]
    return [shard.tensor for shard in tensor.local_shards()] if is_sharded(tensor) else [tensor]


def gathered(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole in `dtype`: on every rank of a DTensor; of a ShardedTensor on the first rank, None on the others.

    Each rank casts its part first: half the bytes travel where a float32 trainer sends bfloat16.
    """
    if hasattr(tensor, "full_tensor"):
        part = tensor.detach().to(dtype)
        if part.device.type != part.device_mesh.device_type:
            part = part.to(part.device_mesh.device_type)  # offloaded to the host, where its ranks have no group
        return part.full_tensor()
    return _sent_to_the_first(tensor, dtype)


def _sent_to_the_first(tensor: Any, dtype: torch.dtype) -> torch.Tensor | None:
    whole = None
    if torch.distributed.get_rank(tensor._process_group) == 0:
        whole = torch.empty(tensor.size(), dtype=dtype, device=tensor._get_preferred_device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the class is old, and that a rank has no part
        tensor.gather(0, whole, dtype=dtype)
    return whole
