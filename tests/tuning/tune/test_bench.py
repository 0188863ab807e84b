"""Measuring real processes of the simulated engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.config import EngineConfig, SimConfig
from engines.errors import EngineStartFailed
from engines.types import EngineKind
from tuning.tune.batch import Ask, Batch
from tuning.tune.bench import EngineBench

pytestmark = pytest.mark.load

BATCH = Batch((Ask(8, 10, 2), Ask(16, 20, 2)), "two prompts")
START_S = 120.0


def engine(folder: Path, step_s: float = 0.005, **levers: object) -> EngineConfig:
    sim = SimConfig(decode_step_s=step_s, decode_step_per_seq_s=0)
    return EngineConfig.model_validate({"kind": EngineKind.SIM, "log_dir": str(folder), "sim": sim, **levers})


class OneAtATime(EngineBench):
    """As on a machine whose GPUs hold one engine."""

    def all_fit(self, engines: Sequence[EngineConfig]) -> bool:
        return False


async def test_speed_is_that_of_all_tokens_until_the_last(tmp_path: Path) -> None:
    found = await EngineBench(BATCH, []).measure(engine(tmp_path, 0.05), [0, 1], START_S, 60.0)
    assert found.failure == ""
    assert len(found.speeds) == 2
    assert found.run_s >= 20 * 0.05
    assert max(found.speeds) <= 60 / (20 * 0.05)


async def test_a_run_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    found = await EngineBench(BATCH, []).measure(engine(tmp_path, 0.2), [0], START_S, 0.5)
    assert found.cut_off
    assert found.failure == "cut off: a batch was not done within 0.5 s"


async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = engine(tmp_path, extra={"no_such_flag": 1})
    found = await EngineBench(BATCH, []).measure(broken, [0], START_S, 60.0)
    assert not found.cut_off
    assert "unrecognized arguments: --no-such-flag" in found.failure


async def test_an_engine_that_needs_more_gpus_than_are_here_is_not_started(tmp_path: Path) -> None:
    large = EngineConfig(kind=EngineKind.SGLANG, device="cuda", model="m", tensor_parallel_size=4)
    found = await EngineBench(BATCH, ["0", "1"]).measure(large, [0], START_S, 60.0)
    assert found.failure == "it needs 4 GPUs, and 2 are here"


@pytest.mark.parametrize(("bench", "starts"), [(EngineBench, 2), (OneAtATime, 3)])
async def test_rounds_alternate_with_as_few_starts_as_can_be(
    tmp_path: Path, bench: type[EngineBench], starts: int
) -> None:
    slow, fast = engine(tmp_path, 0.02), engine(tmp_path, 0.001)
    found = [speeds async for speeds in bench(BATCH, []).rounds([slow, fast], range(3), START_S, 60.0)]
    assert all(slow_one <= 60 / (20 * 0.02) for slow_one, _ in found), "each has the speed of its own engine"
    assert len(found) == 3
    assert _logs(tmp_path) == starts


async def test_rounds_raise_what_a_start_raises(tmp_path: Path) -> None:
    broken = engine(tmp_path, extra={"no_such_flag": 1})
    with pytest.raises(EngineStartFailed):
        await _first(EngineBench(BATCH, []), broken, engine(tmp_path), range(1))


def _logs(folder: Path) -> int:
    return len(list(folder.glob("tune-*.log")))


async def _first(bench: EngineBench, one: EngineConfig, other: EngineConfig, runs: Sequence[int]) -> None:
    async for _ in bench.rounds([one, other], runs, START_S, 60.0):
        return
