"""Levers that may be changed, and levers that may not."""

from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind
from tuning.tune.levers import grid

TINY = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"
SIM = EngineConfig(kind=EngineKind.SIM, max_num_seqs=100)
GPU = EngineConfig(kind=EngineKind.SGLANG, device="cuda", model=str(TINY))


def test_unless_levers_are_given_sequences_are_tried_that_hold_the_batch_or_less() -> None:
    assert grid(SIM, [], 100, 0) == [{"max_num_seqs": 128}, {"max_num_seqs": 64}, {"max_num_seqs": 32}]


def test_what_measurements_favour_comes_first_and_then_what_differs_least() -> None:
    eager = EngineConfig(kind=EngineKind.VLLM, device="cuda", model=str(TINY), enforce_eager=True, max_num_seqs=64)
    settings = grid(eager, [], 64, 1)
    assert settings[0] == {"enforce_eager": False, "api_server_count": 4}
    assert {"enforce_eager": False} in settings[1:5]
    assert settings[-1] == {"max_num_seqs": 16}
    assert len(settings) == 2 * 3 * 2 - 1, "all of the grid but the start"


@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        (SIM, "max_num_seq=8", r"--lever 'max_num_seq': it can be api_server_count, "),
        (SIM, "dtype=float16", r"--lever 'dtype': it can be "),
        (SIM, "max_num_seqs", r"--lever 'max_num_seqs': expected NAME=VALUE,VALUE"),
        (SIM, "max_num_seqs=0", r"--lever max_num_seqs=0: Input should be greater than 0"),
        (GPU, "api_server_count=2", r"SGLang has no such lever; engine\.extra\.tokenizer_worker_num"),
        (GPU, "max_num_seqs=8", "a replica needs 1 GPUs, and 0 are here"),
        (EngineConfig(kind=EngineKind.EXTERNAL, url="http://h:1"), "max_num_seqs=8", "does not start that engine"),
    ],
)
def test_a_lever_that_cannot_be_is_refused_by_name(engine: EngineConfig, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(engine, [given], 64, 0)


def test_values_that_do_not_go_together_are_no_setting() -> None:
    engine = EngineConfig(
        kind=EngineKind.VLLM, model=str(TINY), device="cpu", gpus_per_replica=0.5, gpu_memory_utilization=0.4
    )
    assert grid(engine, ["gpu_memory_utilization=0.9,0.5"], 64, 0) == [{"gpu_memory_utilization": 0.5}]
