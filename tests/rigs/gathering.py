"""The recipe of docs/trainer_client.md (Sharded models): all ranks gather a model, and one pushes it."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_client import WeightSender


def whole(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather each tensor when its turn comes, on every rank."""
    parameters = dict(model.named_parameters())  # neither buffers nor second names
    for name, tensor in model.state_dict().items():
        if name in parameters:
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pushed(sender: WeightSender, model: torch.nn.Module) -> int | None:
    """Push from the first rank; return the version there. The others help it to gather, also where it fails."""
    tensors = whole(model)
    try:
        return sender.push(tensors) if dist.get_rank() == 0 else None
    finally:
        for _ in tensors:
            pass
