"""The study of goodput: what its figures mean, and runs over simulated engines."""

import pytest

from loadtests.studies import goodput
from loadtests.studies.goodput import Stream

FLEET = [
    "gateway.port=0", "gateway.ledger=null", "engine.kind=sim", "engine.model=sim", "engine.num_replicas=2",
    "engine.num_cpus=0.1", "engine.stop_timeout_s=1", "engine.sim.decode_step_s=0.002",
]  # fmt: skip


def stream(*times: float, has_moved: bool = False) -> Stream:
    played = Stream("a")
    played.arrivals = [(at, 10) for at in times]
    played.has_moved = has_moved
    return played


def test_rates_are_of_the_parts_and_gaps_of_what_came_after_the_first_fault(capsys: pytest.CaptureFixture[str]) -> None:
    streams = [stream(0, 5, 6, 7, 9), stream(5, 6, 10, 10, 10, has_moved=True), stream(9.5)]
    assert goodput.told(streams, [0, 5, 10, 12], hurts=1, tokens=50) == 0
    told = capsys.readouterr().out
    assert "before, during and after: 4, 16, 0; 1 engines hurt; goodput 8.000" in told
    assert "moved 4.00 s, of one that stayed 2.00 s" in told
    assert "2 streams ended, 0 failed" in told
    assert goodput.told([stream(1, 2, 3, 4, 5, 6)], [0, 5, 10, 12], hurts=1, tokens=50) == 1, "of another length"


@pytest.mark.load
@pytest.mark.parametrize("hurt", ["KILL", "STOP"])
async def test_streams_go_on_while_engines_are_hurt(hurt: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--streams", "4", "--prompt-tokens", "10", "--tokens", "50", "--signal", hurt]
    times = ["--every-s", "2", "--seconds", "2", "--quiet-s", "1", "--warm-s", "1"]
    assert await goodput.run(goodput.parsed([*FLEET, *sizes, *times])) == 0
    told = capsys.readouterr().out
    assert "1 engines hurt; goodput" in told
    assert " 0 failed or of another length" in told
