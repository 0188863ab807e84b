"""The starts of engines that are no replicas yet."""

import pytest

from engines.types import EngineStart
from gateway.fleet.watch import starts
from gateway.fleet.watch.starts import Starts

START = EngineStart(replica_id="engine-a", group="engine", phases=(("importing", 0.0),))


def test_a_start_that_nobody_tells_any_more_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Starts()
    told.tell(START)
    assert told.now == [START]
    monkeypatch.setattr(starts, "_NEWS_S", 0.0)
    assert (told.now, told.text) == ([], "")


def test_a_start_ends_when_its_engine_joins() -> None:
    told = Starts()
    told.tell(START)
    told.end("engine-b")
    assert told.text.startswith("; engine-a starts: importing for ")
    told.end("engine-a")
    assert told.text == ""
