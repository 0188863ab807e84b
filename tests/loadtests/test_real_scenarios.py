"""Every scenario, in a short form, against two real vLLM replicas on CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_model.task import COMMITTED
from tests.loadtests.locust_runs import Ended, locust
from tests.rigs.engines import real_vllm
from tests.rigs.engines.real_vllm import RealFleet

pytestmark = pytest.mark.vllm

SHORT = ["--prompt-tokens", "24", "--max-tokens", "16"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    pytest.importorskip("vllm")
    with real_vllm.fleet(COMMITTED, tmp_path_factory.mktemp("logs")) as running:
        yield running


async def run(scenario: str, fleet: RealFleet, folder: Path, *options: str) -> Ended:
    """A run in which nothing may fail."""
    ended = await locust(scenario, fleet.url, folder, *SHORT, *options)
    assert ended.has_passed, ended.said
    assert ended.figures["failures"] == 0
    return ended


async def test_trainers_whose_weights_are_updated(fleet: RealFleet, tmp_path: Path) -> None:
    batch = ["-t", "5s", "--prompts", "6", "--samples", "4"]
    ended = await run("trainer", fleet, tmp_path, *batch, "--update-every", "2", "--weights", str(COMMITTED))
    told = ended.figures
    assert told["makespan_s.count"] >= 1
    assert told["completion_tokens.min"] == told["completion_tokens.max"] == 16
    assert told["update_s.count"] >= 1
    assert told["tpot_s.p50"] > 0
    assert told["tail_ratio.min"] >= 1


async def test_agents(fleet: RealFleet, tmp_path: Path) -> None:
    # Sessions that the end of the run cuts short are not counted: they are short, of few users, for a busy machine.
    options = ["-u", "2", "-t", "6s", "--turns", "3", "--tool-gap", "0.05", "--tool-tokens", "8", "--max-tokens", "4"]
    ended = await run("agents", fleet, tmp_path, *options)
    assert ended.figures["later_turn_s.count"] > ended.figures["session_s.count"] >= 1


async def test_arrivals(fleet: RealFleet, tmp_path: Path) -> None:
    ended = await run("open_loop", fleet, tmp_path, "-t", "4s", "--rate", "4")
    assert ended.figures["ttft_s.p50"] < ended.figures["completion_s.p50"]
