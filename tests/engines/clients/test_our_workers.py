"""Calls that our code in an engine's workers answers, and the looks at workers that receive."""

from typing import Any

import pytest

from engines.clients import our_workers
from engines.clients.vllm_engine import VllmEngine

TIMEOUT_S = 600.0


class Clock:
    """Time that passes where the client sleeps, and while an engine takes a step before it answers."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def step(self) -> None:
        self.now_s += self.step_s


@pytest.mark.parametrize(("takes_s", "most_looks"), [(0.0, 1), (0.1, 8), (0.25, 18), (60.0, 1300)])
async def test_arrived_weights_are_seen_within_a_step_and_a_sixteenth_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, most_looks: int
) -> None:
    clock, looks = Clock(step_s=0.012), list[float]()
    monkeypatch.setattr(our_workers, "time", clock)
    monkeypatch.setattr(our_workers, "asyncio", clock)
    engine = VllmEngine("r1", "http://127.0.0.1:1")

    async def on_workers(method: str, arguments: dict[str, Any], timeout_s: float) -> list[Any]:
        await clock.step()
        if method == "staged":
            looks.append(clock.now_s)
        return [{"ready": clock.now_s >= takes_s}]

    monkeypatch.setattr(engine, "_on_workers", on_workers)
    await engine.stage_weights({}, TIMEOUT_S)
    await engine.close()
    assert looks[-1] - takes_s <= max(2 * clock.step_s, clock.step_s + 0.002 + min(0.05, takes_s / 16))
    assert len(looks) <= most_looks
