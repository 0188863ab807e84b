"""Gateways of one and of several processes: the table of their rounds, and a run of all processes."""

import sys
from pathlib import Path

import orjson
import pytest

from loadtests.studies.gateway_cost import workers
from loadtests.studies.gateway_cost.load_processes import unlike
from loadtests.studies.gateway_cost.workers import Round, table


def _round(requests: int, owner: float, worked: list[float]) -> Round:
    return Round(requests=requests, seconds=2.0, owner=owner, workers=worked, clients=[0.5, 1.0], engines=[0.25])


def test_speeds_are_those_of_the_busiest_process_and_over_the_first_gateway() -> None:
    found = {"chat 64": {1: [_round(1000, 2.0, [])], 2: [_round(1500, 0.5, [1.0, 1.5])]}}
    one, two = table(found).splitlines()[2:]
    share = "0.25 to 0.50 | 0.12 to 0.12 |"
    assert one == f"| chat 64 | 1 | 2,000 | 0 | 500 | 1.00 | 500 | 1.00 (1.00 to 1.00) | 1.00 |  | {share}"
    assert (
        two == f"| chat 64 | 2 | 333 | 1,667 | 1,000 | 2.00 | 750 | 1.50 (1.50 to 1.50) | 0.25 | 0.50 to 0.75 | {share}"
    )


def test_bodies_differ_and_mean_the_same() -> None:
    data = b'{"n": 8}'
    bodies = [unlike(data, number) for number in range(9)]
    assert len(set(bodies)) == 9
    assert [orjson.loads(body) for body in bodies] == [{"n": 8}] * 9


@pytest.mark.load
def test_all_gateways_answer_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    words = ["--workers", "1", "2", "--clients", "2", "--engines", "2", "--rounds", "2", "--seconds", "0.3"]
    monkeypatch.setattr(sys, "argv", ["workers", *words, "--rows", "single 64/64", "--json", str(out)])
    assert workers.main() == 0
    found = orjson.loads(out.read_bytes())["single 64/64"]
    assert {number: len(rounds) for number, rounds in found.items()} == {"1": 2, "2": 2}
    assert all(len(one["clients"]) == len(one["engines"]) == 2 for rounds in found.values() for one in rounds)
    assert all(one["requests"] > 0 and one["seconds"] < 5 for rounds in found.values() for one in rounds)
    assert [len(one["workers"]) for one in found["2"]] == [2, 2]
