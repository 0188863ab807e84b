"""The study of lost replicas: what its figures mean, and a run over simulated engines."""

from argparse import Namespace
from pathlib import Path

from loadtests.studies import lost_replica
from loadtests.studies.lost_replica import Stream

CONFIG = """
gateway: {port: 0, ledger: null}
engine: {kind: sim, model: sim, num_replicas: 2, num_cpus: 0.1, stop_timeout_s: 1, sim: {decode_step_s: 0.02}}
"""


def stream(*times: float, has_moved: bool = False) -> Stream:
    played = Stream("a")
    played.arrivals = [(at, 10) for at in times]
    played.has_moved = has_moved
    return played


def test_gaps_that_ended_before_the_loss_do_not_count_and_streams_are_told_apart() -> None:
    streams = [stream(0, 5, 6, 7, 9), stream(5, 6, 10, has_moved=True), stream(9.5)]
    found = lost_replica._figures(streams, hurt_at=6.5, tokens=50)
    assert found["moved"] == 1
    assert found["longest gap of one that stayed, s"] == 2
    assert found["longest gap of one that moved, s"] == 4
    assert found["rate of those that stayed"] == 30 / 20
    assert found["seconds"] == 3.5
    assert (found["failed"], found["of another length"]) == (0, 2)


async def test_streams_of_a_stopped_engine_move_and_those_of_the_other_stay(tmp_path: Path) -> None:
    (config := tmp_path / "sim.yaml").write_text(CONFIG)
    args = Namespace(
        config=config, overrides=[], streams=6, prompt_tokens=40, tokens=96, hurt=["stop"], timeout_s=60.0
    )  # fmt: skip
    calm, _, stopped = await lost_replica.study(args)
    assert (calm["moved"], stopped["moved"]) == (0, 3)
    assert [one["failed"] + one["of another length"] for one in (calm, stopped)] == [0, 0]
