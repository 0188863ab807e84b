"""A trainer of two ranks, real processes joined by gloo, pushes models sharded in all ways to simulated replicas."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engines.config import SimConfig
from gateway.config.schema import Config
from tests.material.sharded_model import SHAPES, WORLD_SIZE
from tests.rigs.rig import FAST_WATCH, Rig

TIMEOUT_S = 240.0

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the first rank reports of each case."""
    return asyncio.run(played(tmp_path_factory.mktemp("ranks")))


async def played(folder: Path) -> Told:
    sim = {"tensors": SHAPES, "decode_step_s": 0.0, "decode_step_per_seq_s": 0.0}
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2}
    tree = {"engine": engine, "fleet": FAST_WATCH, "weights": {"store": str(folder / "store")}}
    rig = Rig(Config.model_validate(tree), SimConfig.model_validate(sim))
    await rig.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            first, *_ = await asyncio.gather(*(run_rank(rank, folder, rig.url) for rank in range(WORLD_SIZE)))
    finally:
        await rig.stop()
    return {case["case"]: case for case in map(json.loads, first.splitlines())}


async def run_rank(rank: int, folder: Path, url: str) -> str:
    # gloo would take the address of this machine's name, which in a container may lead nowhere.
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words, pipe = (
        (sys.executable, "-m", "tests.rigs.trainer_rank", str(rank), str(folder), url),
        asyncio.subprocess.PIPE,
    )
    process = await asyncio.create_subprocess_exec(*words, env=env, stdout=pipe, stderr=pipe)
    try:
        said, complaints = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, complaints.decode()[-4000:]
    return said.decode()


@pytest.mark.parametrize(
    "case",
    ["fsdp2", "fsdp2_after_a_step", "fsdp2_on_a_mesh_of_two_dimensions", "tensor_parallel", "data_parallel"],
)
def test_what_all_ranks_gather_and_one_pushes_is_served(told: Told, case: str) -> None:
    assert told[case]["same"], told[case]
    assert told[case]["names"] == sorted(SHAPES), "the tied head is sent once"


def test_no_rank_is_left_in_a_collective_where_the_push_is_refused(told: Told) -> None:
    assert "InvalidRequest: named_tensors has '0.weight'" in told["of_another_model"]["error"]


@pytest.mark.parametrize(("case", "said"), [("fsdp2", "full_tensor()"), ("flat", "full_state_dict=True")])
def test_a_sharded_model_as_it_is_is_refused_with_the_remedy(told: Told, case: str, said: str) -> None:
    assert said in told[f"{case} as it is"]["error"]
