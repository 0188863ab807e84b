"""The campaign of gateways killed under batches, in short."""

from pathlib import Path

import orjson
import pytest

from loadtests.chaos.replays import main

pytestmark = [pytest.mark.load, pytest.mark.slow]


def test_killed_gateways_lose_nothing_and_deliver_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    size = ["--rollouts", "1024", "--replicas", "2", "--clients", "16", "--kill-every", "8"]
    assert main([*size, "--json", str(out)]) == 0
    found = orjson.loads(out.read_bytes())
    assert found["kills"] > 0
    assert found["replays"] > 0
    assert found["tally"]["delivered"] == 1024
