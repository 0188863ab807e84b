"""The engine is killed, and started anew. Last of all, since nobody can use it meanwhile."""

import asyncio
import os
import re
import signal

import pytest

from engines.errors import DeadlineExceeded, EngineError, EngineUnreachable
from engines.weight_label import WeightLabel
from tests.engines.conformance.subject import REQUEST_S, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")

_SOON_S = 30.0


async def test_a_killed_engine_is_told_with_its_last_words_and_a_new_start_serves(engine: Subject) -> None:
    before = engine.info
    async with engine.running(max_tokens=engine.longest) as request:
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(EngineUnreachable):
            await request.finished()
    assert re.search(r"\(exit code 137\).*\n    log .* ends with:\n    \| ", await _complaint(engine))
    await engine.start_again()
    await engine.server.check()
    assert engine.info.incarnation != before.incarnation
    assert len(await engine.token_ids()) == 16
    assert await engine.engine.weight_label(REQUEST_S) == WeightLabel()


async def _complaint(engine: Subject) -> str:
    """The check's error once the process is gone; until then the engine is only unreachable."""
    async with asyncio.timeout(_SOON_S):
        while True:
            with pytest.raises((EngineError, DeadlineExceeded)) as failed:
                await engine.server.check()
            if not isinstance(failed.value, EngineUnreachable | DeadlineExceeded):
                return str(failed.value)
            await asyncio.sleep(0.1)
