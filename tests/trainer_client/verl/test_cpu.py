"""verl on the CPU platform that it lacks."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")

pytestmark = pytest.mark.verl

PROGRAM = """
import torch
from torch.distributed.fsdp import fully_shard
import verl
from verl.utils import fsdp_utils

torch.distributed.init_process_group("cpu:gloo,cpu:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2, bias=False)
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
before = model.weight.full_tensor().clone()
saved, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
with torch.no_grad():
    model.weight.add_(1)
fsdp_utils.fsdp2_sharded_load_from_cpu(model, saved, spec)
assert torch.equal(model.weight.full_tensor(), before)
print("restored")
"""


def test_weights_that_verl_saves_and_restores_are_those_of_then() -> None:
    environ = {**os.environ, "VERL_PLATFORM": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["restored"], done.stderr[-3000:]
