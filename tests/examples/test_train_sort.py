"""TRL's own trainer on the digit-sorting task, against two real vLLM replicas behind the gateway, for many steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet
from tests.rigs.sorting import assert_engines_hold, rise, run_trainer
from tests.rigs.waiting import wait_until
from tests.running.client_records import runs_client, vllm_replicas

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS = 36
STEPS_OF_POOL = 24
RISE, FLAT = 0.15, 0.08
SOON_S = 60.0


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFleet]:
    with fleet(task.COMMITTED, tmp_path) as running:
        yield running


GRPO = runs_client(
    "TRL GRPOTrainer", "trl", ran="digit-sorting, weights synced before each step", against=vllm_replicas(2)
)


@GRPO
def test_a_replica_killed_in_the_middle_does_not_end_the_run(
    real: RealFleet, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seen: list[dict[str, Any]] = []

    def kill_one(step: dict[str, Any]) -> None:
        seen.append(step)
        if step["step"] == 2:
            kill_while_it_generates(real, 1)
        if step["step"] == 5:
            real.restart(1)

    run_trainer(real, tmp_path / "model", "--steps", "8", on_step=kill_one)
    assert [step["step"] for step in seen] == list(range(1, 9))
    assert [step["weight_version"] for step in seen] == list(range(1, 9))
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in seen)
    real.until_serving(version=9)
    assert_engines_hold(real, tmp_path / "model")
    record_property("fact", "a replica killed -9 while it generated did not end the run")


@GRPO
@pytest.mark.parametrize("seed", [0])
def test_the_reward_rises_with_weight_sync_and_only_with_it(
    real: RealFleet, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    cut_off = run_trainer(real, tmp_path / "cut", "--steps", str(STEPS), "--seed", str(seed), "--no-sync")
    assert abs(rise(cut_off)) < FLAT
    synced = run_trainer(real, tmp_path / "model", "--steps", str(STEPS), "--seed", str(seed))
    assert rise(synced) > RISE
    record_property("fact", f"reward {rise(synced):+.2f} over {STEPS} steps")
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in synced)
    assert_engines_hold(real, tmp_path / "model")


@runs_client("TRL GRPOTrainer, pool", "trl", ran="digit-sorting out of a pool of 48 groups", against=vllm_replicas(2))
def test_the_reward_rises_out_of_a_pool_too(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with fleet(task.COMMITTED, tmp_path, levers={"stream_interval": 2}) as real:
        steps = run_trainer(real, tmp_path / "model", "--steps", str(STEPS_OF_POOL), "--pool", "48")
        assert rise(steps) > RISE
        assert max(step["older"] for step in steps) > 0
        assert_engines_hold(real, tmp_path / "model")
    record_property("fact", f"reward {rise(steps):+.2f} over {STEPS_OF_POOL} steps")


def kill_while_it_generates(real: RealFleet, index: int) -> None:
    wait_until(lambda: real.call("/status")[1]["replicas"][index]["samples_in_flight"], SOON_S)
    real.kill(index)
