"""A trainer of two ranks, real processes joined by gloo, pushes models sharded in all ways to simulated replicas."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.config import SimConfig
from engines.errors import WeightUpdateConflict
from gateway.api import body_of, status_of
from gateway.config.schema import Config
from tests.material.sharded_model import SHAPES, WORLD_SIZE, Model
from tests.rigs.rig import FAST_WATCH, Rig
from tests.rigs.stories.played_gateway import PlayedGateway

TIMEOUT_S = 240.0
DONE = [
    "fsdp2",
    "fsdp2_after_a_step",
    "fsdp2_on_a_mesh_of_two_dimensions",
    "tensor_parallel",
    "copies_that_are_tensor_parallel",
    "data_parallel",
    "dict_of_dtensors",
    "iterator_of_dtensors",
    "in_inference_mode",
]

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def group() -> Iterator[PlayedGateway]:
    """Two engines that receive over gloo, and serve version 6."""
    played = PlayedGateway()
    refused = WeightUpdateConflict("version = 6 cannot be pushed")
    conflict = status_of(refused), body_of(refused)
    played.answers["/start_weight_update"] = lambda body: conflict if body.get("version") == 6 else (200, {})
    yield played
    played.close()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, group: PlayedGateway) -> Told:
    """The reports of each rank on each case, in the order of ranks."""
    return asyncio.run(played(tmp_path_factory.mktemp("ranks"), group.url))


async def played(folder: Path, group_url: str) -> Told:
    sim = {"tensors": SHAPES, "decode_step_s": 0.0, "decode_step_per_seq_s": 0.0}
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2}
    tree = {"engine": engine, "fleet": FAST_WATCH, "weights": {"store": str(folder / "store")}}
    rig = Rig(Config.model_validate(tree), SimConfig.model_validate(sim))
    await rig.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await run_ranks(folder, rig.url, group_url)
    finally:
        await rig.stop()
    said = [
        [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()] for rank in range(WORLD_SIZE)
    ]
    return {case["case"]: [lines[place] for lines in said] for place, case in enumerate(said[0])}


async def run_ranks(folder: Path, *urls: str) -> None:
    # gloo would take the address of this machine's name, which in a container may lead nowhere.
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = (sys.executable, "-m", "tests.rigs.trainer_rank", str(folder), *urls)
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        _, complaints = await process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode == 0, complaints.decode()[-4000:]


@pytest.mark.parametrize("case", DONE)
def test_every_rank_takes_part_and_the_whole_tensors_are_served(told: Told, case: str) -> None:
    first, second = told[case]
    assert first["same"], first
    assert first["names"] == sorted(SHAPES), "the tied head is sent once, and a buffer that is not served is not"
    assert first["version"] == second["version"]


def test_the_first_generation_of_fsdp_is_refused_with_the_remedy(told: Told) -> None:
    assert all("use fully_shard" in one["message"] for one in told["fsdp1"])


def test_shards_are_cast_to_the_dtype_asked_for(told: Told) -> None:
    assert told["fsdp2_in_bfloat16"][0]["same"]
    assert told["fsdp2_in_bfloat16"][0]["dtypes"] == ["torch.bfloat16"]
    assert told["fsdp2"][0]["dtypes"] == ["torch.float32"], "unless asked it is the dtype that is served"


def test_no_more_is_gathered_at_a_time_than_the_bound_or_one_tensor(told: Told) -> None:
    first, _ = told["one_tensor_at_a_time"]
    assert first["same"]
    assert first["gathered"] == [1] * len(SHAPES)


def test_what_changed_on_one_rank_alone_is_pushed(told: Told) -> None:
    first, second = told["changed_on_one_rank"]
    assert first["same"], first
    assert first["version"] == second["version"]


def test_engines_of_a_group_receive_whole_tensors(told: Told, group: PlayedGateway) -> None:
    assert [one["version"] for one in told["through_a_group"]] == [7, 7]
    expected = dict(Model(seed=4).named_parameters())
    for received in group.received:
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], parameter) for name, parameter in expected.items())


OTHERS = "trainer rank 1 pushes other tensors than rank 0"


@pytest.mark.parametrize(
    ("case", "error", "said"),
    [
        ("through_a_group_that_refuses", "WeightUpdateConflict", "version = 6 cannot be pushed"),
        ("ranks_that_differ", "InvalidRequest", OTHERS),
        ("stages_of_a_pipeline", "InvalidRequest", OTHERS),
    ],
)
def test_every_rank_raises_what_ended_the_push(told: Told, case: str, error: str, said: str) -> None:
    for one in told[case]:
        assert one["error"] == error
        assert said in one["message"]


def test_a_rank_that_fails_raises_its_own_error_and_the_others_name_it(told: Told) -> None:
    first, second = told["a_rank_that_fails_at_the_last_tensor"]
    assert "trainer rank 1 failed to give its tensors" in first["message"]
    assert second["message"] == "no memory"


def test_the_next_push_goes_well_after_all_that(told: Told) -> None:
    assert told["after_all_that"][0]["same"]
    assert told["after_all_that"][0]["version"] == told["changed_on_one_rank"][0]["version"] + 1


def test_a_rank_that_missed_a_push_takes_part_in_the_next(told: Told) -> None:
    first, second = told["a_rank_that_missed_a_push"]
    assert first["version"] == second["version"]
    assert (len(first["errors"]), second["errors"]) == (1, [])


def test_a_sender_that_stays_away_is_not_awaited_for_ever(told: Told) -> None:
    _, second = told["a_sender_that_stays_away"]
    assert second["error"] == "DeadlineExceeded"
    assert "the ranks [0, 1] did not all take part within 2 s" in second["message"]
