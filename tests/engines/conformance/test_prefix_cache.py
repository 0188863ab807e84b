"""Whose prefixes are reused, and when they are forgotten."""

import pytest

from tests.engines.conformance.lacks import not_run
from tests.engines.conformance.subject import REQUEST_S, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

_PREFIX = [5 + number % 10 for number in range(300)]
"""Longer than two blocks of the largest block size, which is 128 on CPU."""


@pytest.fixture(autouse=True)
def _has_a_cache(engine: Subject) -> None:
    if engine.config.enable_prefix_caching is False or engine.config.extra.get("disable_radix_cache"):
        not_run("the engine was started without a prefix cache")


async def test_an_equal_prefix_is_read_once(engine: Subject) -> None:
    assert await engine.cached_tokens(prompt=_PREFIX, cache_salt="reused") == 0
    assert 100 < await engine.cached_tokens(prompt=_PREFIX, cache_salt="reused") < len(_PREFIX)


async def test_a_salt_keeps_prefixes_apart(engine: Subject) -> None:
    assert await engine.cached_tokens(prompt=_PREFIX, cache_salt="one") == 0
    assert await engine.cached_tokens(prompt=_PREFIX, cache_salt="other") == 0


async def test_a_reset_forgets_prefixes(engine: Subject) -> None:
    await engine.cached_tokens(prompt=_PREFIX, cache_salt="forgotten")
    assert await engine.engine.reset_prefix_cache(REQUEST_S) is True
    assert await engine.cached_tokens(prompt=_PREFIX, cache_salt="forgotten") == 0


async def test_a_reset_under_running_requests_says_that_it_did_nothing(engine: Subject) -> None:
    async with engine.running(max_tokens=engine.longest) as request:
        assert await engine.engine.reset_prefix_cache(REQUEST_S) is False
        assert not request.is_over
