"""One rank of a trainer of two whose model is sharded by FSDP2 and pushed to real engines: for test_real_senders.py.

    python -m tests.rigs.model_rank RANK FOLDER URL TRANSPORT MODEL...

Pushes the checkpoints MODEL one after the other. The first rank prints each version.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.rigs.gathering import pushed
from trainer_client import BlockingRolloutClient, WeightSender

WORLD_SIZE = 2
TIMEOUT_S = 60.0


def sharded(folder: str, mesh: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    rank, folder, url, transport, *models = sys.argv[1:]
    meeting = dist.FileStore(str(Path(folder) / f"ranks-{transport}"), WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=meeting, rank=int(rank), world_size=WORLD_SIZE, timeout=timedelta(seconds=TIMEOUT_S)
    )
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    with (
        BlockingRolloutClient(url) as client,
        WeightSender(client, transport=transport, timeout_s=TIMEOUT_S) as sender,  # type: ignore[arg-type]
    ):
        for model in models:
            if (version := pushed(sender, sharded(model, mesh))) is not None:
                print(version, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
