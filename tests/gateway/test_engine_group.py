"""The options of an engine group's deployment in Ray Serve."""

from typing import Any

import pytest

pytest.importorskip("ray")

from engines import serve_replica
from engines.config import EngineConfig
from engines.process import engine_server
from engines.process.process import longest_stop_s
from gateway import app


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a group's deployment."""
    settings: dict[str, Any] = {}

    class Deployed:
        def bind(self, *_: object) -> None: ...

    def deployment(**given: Any) -> Any:
        settings.update(given)
        return lambda _: Deployed()

    monkeypatch.setattr("gateway.app.serve.deployment", deployment)
    app._engine_group("engine", EngineConfig(drain_timeout_s=7.0, stop_timeout_s=3.0), ())
    return settings


def test_a_check_tells_its_reason_before_those_who_ask_give_up(told: dict[str, Any]) -> None:
    assert engine_server._PROBE_TIMEOUT_S <= serve_replica._ASK_TIMEOUT_S < told["health_check_timeout_s"]


def test_serve_gives_a_replica_the_time_that_its_drain_and_the_stop_of_its_engine_may_take(
    told: dict[str, Any],
) -> None:
    assert told["graceful_shutdown_timeout_s"] > 7.0 + longest_stop_s(3.0)
