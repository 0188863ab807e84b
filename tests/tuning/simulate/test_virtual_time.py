"""The virtual clock: sleeps cost nothing, and all clocks of waits are one."""

import asyncio
import time

import pytest

from tuning.simulate import virtual_time


def test_hours_pass_at_once_and_in_order() -> None:
    woken: list[int] = []

    async def sleep(hours: int) -> None:
        await asyncio.sleep(3600 * hours)
        woken.append(hours)

    async def main() -> float:
        began = time.monotonic()
        await asyncio.gather(*(sleep(hours) for hours in (30, 1, 7)))
        return time.monotonic() - began

    began = time.perf_counter()
    assert virtual_time.run(main) == pytest.approx(30 * 3600)
    assert time.perf_counter() - began < 3600
    assert woken == [1, 7, 30]


def test_the_clock_is_real_again_afterwards() -> None:
    real = time.monotonic

    async def main() -> None:
        assert time.monotonic is not real
        raise KeyError("main")

    with pytest.raises(KeyError, match="main"):
        virtual_time.run(main)
    assert time.monotonic is real


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock, match="no task can go on"):
        virtual_time.run(main)
