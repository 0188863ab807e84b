"""The witness of real engines: what their answers must not be is counted. And the fleet that it watches."""

from pathlib import Path
from typing import Any

import pytest

from engines.types import EngineKind
from loadtests.chaos.processes.real_engines import GreedyWitness, real_config
from loadtests.chaos.tally import Tally

Json = dict[str, Any]
TOKENS = list(range(3, 51))


@pytest.fixture
def witness() -> GreedyWitness:
    return GreedyWitness("http://127.0.0.1:1", num_clients=1, bound_s=1)


def choices(version: int = 0, **odd: Any) -> list[Json]:
    spans = [{"version": version, "start": 0, "end": 48}]
    return [{"index": index, "token_ids": TOKENS, "weight_versions": spans} | odd for index in range(8)]


def tallied(witness: GreedyWitness, floor: int, *batches: list[Json]) -> Tally:
    witness.version = floor
    for batch in batches:
        witness._answered(witness._numbered(7)[0], batch)
    return witness.record.tally


def test_the_same_answer_of_another_version_is_right(witness: GreedyWitness) -> None:
    tally = tallied(witness, 0, choices(), choices(version=3))
    assert (tally.delivered, tally.wrong, tally.stale) == (16, 0, 0)


def test_a_token_that_differs_from_the_first_answer_is_wrong(witness: GreedyWitness) -> None:
    tally = tallied(witness, 0, choices(), choices(token_ids=[*TOKENS[:-1], 900]))
    assert tally.wrong == 8
    assert "token 47 of prompt" in tally.reasons[0]


def test_a_short_answer_is_wrong(witness: GreedyWitness) -> None:
    assert tallied(witness, 0, choices(token_ids=TOKENS[:-1])).wrong == 8


def test_an_answer_of_older_weights_than_the_fleet_had_is_stale(witness: GreedyWitness) -> None:
    assert tallied(witness, 2, choices(version=1)).stale == 8


def test_its_fleet_is_that_of_the_example_with_a_port_and_a_name_of_its_own(tmp_path: Path) -> None:
    config = real_config(3, tmp_path)
    assert (config.engine.kind, config.engine.num_replicas) == (EngineKind.VLLM, 3)
    assert config.name.startswith("soak-vllm-")
    assert config.gateway.port != 8100
