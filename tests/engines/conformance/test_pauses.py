"""Pause and resume in all modes, with requests in flight."""

import asyncio

import pytest

from engines.types import EngineKind, PauseMode
from tests.engines.conformance.subject import REQUEST_S, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

both_caches = pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache cleared"])


@both_caches
async def test_a_pause_that_aborts_ends_requests_with_the_tokens_they_have(engine: Subject, clear_cache: bool) -> None:
    request = await engine.met_by_a_pause(PauseMode.ABORT, clear_cache=clear_cache, max_tokens=engine.longest)
    assert request.finish_reason == "abort"
    assert 0 < len(request.token_ids) < engine.longest


@both_caches
async def test_a_pause_that_waits_lets_requests_finish(engine: Subject, clear_cache: bool) -> None:
    async with engine.running() as request, engine.paused(PauseMode.WAIT, clear_cache=clear_cache):
        # SGLang has no such pause: our client waits for it, which tests of the client hold.
        assert engine.kind is EngineKind.SGLANG or await engine.is_idle_within(engine.still_s)
        await request.finished()
    assert request.finish_reason == "length"
    assert len(request.token_ids) == engine.long


@both_caches
async def test_a_pause_that_keeps_freezes_requests_and_they_go_on(engine: Subject, clear_cache: bool) -> None:
    asked = {"cache_salt": f"kept {clear_cache}"}
    request = await engine.met_by_a_pause(PauseMode.KEEP, clear_cache=clear_cache, **asked)
    assert request.finish_reason == "length"
    assert len(request.token_ids) == engine.long
    if not clear_cache:  # computed anew, near ties may fall to the other side
        assert request.token_ids == await engine.token_ids(max_tokens=engine.long)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_request_that_comes_in_a_pause_waits_for_its_end(engine: Subject, mode: PauseMode) -> None:
    async with engine.paused(mode):
        asked = asyncio.create_task(engine.token_ids(max_tokens=4))
        await asyncio.sleep(engine.still_s)
        assert not asked.done()
    assert len(await asyncio.wait_for(asked, REQUEST_S)) == 4


async def test_a_resume_without_a_pause_is_no_error(engine: Subject) -> None:
    await engine.engine.resume(REQUEST_S)
    assert len(await engine.token_ids(max_tokens=2)) == 2
