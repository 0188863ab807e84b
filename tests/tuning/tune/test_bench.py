"""Measuring real processes of the simulated engine."""

from pathlib import Path

import pytest

from engines.config import EngineConfig, SimConfig
from engines.errors import DeadlineExceeded
from engines.types import EngineKind
from tuning.tune.batch import Ask, Batch
from tuning.tune.bench import EngineBench

pytestmark = pytest.mark.load

BATCH = Batch((Ask(8, 10, 2), Ask(16, 20, 2)), "two prompts")
START_S = 120.0


def engine(folder: Path, step_s: float, **levers: object) -> EngineConfig:
    sim = SimConfig(decode_step_s=step_s, decode_step_per_seq_s=0)
    return EngineConfig.model_validate({"kind": EngineKind.SIM, "log_dir": str(folder), "sim": sim, **levers})


async def test_a_run_takes_until_the_last_token_and_no_longer_than_it_may(tmp_path: Path) -> None:
    async with EngineBench(BATCH, []).serving(engine(tmp_path, 0.05), START_S) as running:
        assert await running.run(0, 60.0) >= 20 * 0.05
        with pytest.raises(DeadlineExceeded, match="cut off: a batch was not done"):
            await running.run(1, 0.5)
