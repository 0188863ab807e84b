"""Calls at the same time: their failures, and their begin."""

import asyncio

import pytest

from gateway.fleet.concurrency import together


async def test_the_first_failure_ends_calls_that_have_begun_and_begins_no_other() -> None:
    ended: list[int] = []

    async def call(number: int) -> None:
        if number == 1:
            raise KeyError(number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(KeyError):
        await together(call(number) for number in range(100))
    assert ended
    assert len(ended) < 99
