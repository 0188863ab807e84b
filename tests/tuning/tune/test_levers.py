"""Levers that may be changed, and levers that may not."""

from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind
from tuning.tune.levers import Lever, Setting, expected_of, levers_of, start_of

TINY = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"
SIM = EngineConfig(kind=EngineKind.SIM)
GPU = EngineConfig(kind=EngineKind.SGLANG, device="cuda", model=str(TINY))


def test_the_starts_own_value_is_always_among_those_tried() -> None:
    levers = levers_of(SIM.model_copy(update={"max_num_seqs": 100}), ["max_num_seqs=8,16"], 64, 0)
    assert levers == [Lever("max_num_seqs", (100, 8, 16))]


def test_sequences_are_tried_up_to_what_holds_the_whole_batch() -> None:
    levers = {lever.name: lever.values for lever in levers_of(SIM, [], 100, 0)}
    assert levers["max_num_seqs"] == (256, 16, 32, 64, 128)


def test_eager_is_tried_off_where_it_is_on() -> None:
    eager = SIM.model_copy(update={"enforce_eager": True})
    assert Lever("enforce_eager", (True, False)) in levers_of(eager, [], 64, 0)
    assert "enforce_eager" not in [lever.name for lever in levers_of(SIM, [], 64, 0)]


@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        (SIM, "max_num_seq=8", r"--lever 'max_num_seq': it can be api_server_count, "),
        (SIM, "dtype=float16", r"--lever 'dtype': it can be "),
        (SIM, "max_num_seqs", r"--lever 'max_num_seqs': expected NAME=VALUE,VALUE"),
        (SIM, "max_num_seqs=0", r"--lever max_num_seqs=0: Input should be greater than 0"),
        (GPU, "api_server_count=2", r"SGLang has no such lever; engine\.extra\.tokenizer_worker_num"),
        (
            EngineConfig(kind=EngineKind.EXTERNAL, url="http://h:1"),
            "max_num_seqs=8",
            "the gateway does not start that engine",
        ),
    ],
)
def test_a_lever_that_cannot_be_is_refused_by_name(engine: EngineConfig, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        levers_of(engine, [given], 64, 0)


def test_values_that_do_not_go_together_are_no_setting() -> None:
    engine = EngineConfig(kind=EngineKind.VLLM, model=str(TINY), max_num_seqs=64)
    levers = [Lever("max_num_seqs", (64, 512)), Lever("max_num_batched_tokens", (None, 256))]
    start = start_of(engine, levers)
    fewer = start.changed_to("max_num_batched_tokens", 256)
    assert fewer.applied_to(engine).max_num_batched_tokens == 256
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens = 256: a step cannot hold engine\.max_num_seqs = 512"
    ):
        fewer.changed_to("max_num_seqs", 512).applied_to(engine)


def test_a_setting_is_told_by_what_it_changes() -> None:
    levers = [Lever("max_num_seqs", (256, 8)), Lever("enforce_eager", (False, True))]
    start = start_of(SIM, levers)
    assert start.changes_text(start) == "start"
    assert start.changed_to("enforce_eager", True).changes_text(start) == "enforce_eager=true"


def test_what_is_too_little_is_expected_to_be_enough_and_the_rest_to_stay() -> None:
    slow = SIM.model_copy(update={"enforce_eager": True, "max_num_seqs": 16, "max_num_batched_tokens": 512})
    given = ["enforce_eager=false", "max_num_seqs=64,128,512", "max_num_batched_tokens=2048,8192,32768"]
    levers = levers_of(slow, [*given, "stream_interval=32,128"], 100, 0)
    expected = expected_of(slow, levers, 100).changes_from(start_of(slow, levers))
    assert expected == {"enforce_eager": False, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    large = slow.model_copy(update={"enforce_eager": False, "max_num_seqs": 1024, "max_num_batched_tokens": None})
    assert expected_of(large, levers, 100) == start_of(large, levers)


def test_the_most_that_is_tried_is_expected_where_nothing_is_enough() -> None:
    levers = [Lever("max_num_seqs", (8, 16, 32))]
    few = SIM.model_copy(update={"max_num_seqs": 8})
    assert expected_of(few, levers, 100) == Setting((("max_num_seqs", 32),))
