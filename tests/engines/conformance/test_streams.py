"""The same answer in chunks, and what becomes of a request whose client goes away."""

import asyncio
from contextlib import suppress

import pytest

from engines.errors import DeadlineExceeded
from tests.engines.conformance.subject import COMPLETIONS, PROMPT, REQUEST_S, Json, Subject

_TRIES = 5

pytestmark = pytest.mark.asyncio(loop_scope="session")


def parts_of(chunks: list[Json], index: int = 0) -> list[Json]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


async def test_chunks_put_together_are_the_whole_answer(engine: Subject) -> None:
    asked = {"max_tokens": 40, "logprobs": 0, "return_tokens_as_token_ids": True}
    whole = await engine.choice(**asked)
    parts = parts_of(await engine.stream(**asked))
    assert [token_id for part in parts for token_id in part["token_ids"] or []] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    for column in ("tokens", "token_logprobs"):
        told = [entry for part in parts if part["logprobs"] for entry in part["logprobs"][column]]
        if column == "tokens":
            assert told == whole["logprobs"][column]
        else:
            assert told == pytest.approx(whole["logprobs"][column], abs=engine.tolerance)
    assert [part["prompt_token_ids"] for part in parts if part["prompt_token_ids"]] == [PROMPT]


async def test_a_chunk_has_about_as_many_tokens_as_the_stream_interval(engine: Subject) -> None:
    interval = engine.config.stream_interval
    tokens = min(engine.longest, 4 * interval)
    parts = parts_of(await engine.stream(max_tokens=tokens))
    # The first token may come alone and the last chunk be short; a reader that is late finds two chunks in one.
    assert 2 <= len(parts) <= tokens / interval + 2


async def test_samples_are_streamed_side_by_side(engine: Subject) -> None:
    chunks = await engine.stream(n=3, temperature=1.5, max_tokens=40, stream_options={"include_usage": True})
    samples = [[token_id for part in parts_of(chunks, i) for token_id in part["token_ids"] or []] for i in range(3)]
    assert [len(sample) for sample in samples] == [40] * 3
    assert len(set(map(tuple, samples))) == 3
    assert [parts_of(chunks, i)[-1]["finish_reason"] for i in range(3)] == ["length"] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 120


async def test_a_stream_that_is_closed_frees_its_sequence(engine: Subject) -> None:
    async with engine.running(max_tokens=engine.longest) as request:
        await request.close()
        assert await engine.is_idle_within(_half(engine))


async def test_a_request_that_is_cancelled_frees_its_sequence(engine: Subject) -> None:
    for _ in range(_TRIES):  # a busy machine may look when one is over
        asked = asyncio.create_task(engine.complete(max_tokens=engine.longest))
        while await engine.engine.reset_prefix_cache(REQUEST_S) and not asked.done():
            pass  # until it holds a part of the cache
        if not asked.done():
            break
    assert not asked.done(), "it was over before it was cancelled"
    asked.cancel()
    with suppress(asyncio.CancelledError):
        await asked
    assert await engine.is_idle_within(_half(engine))


async def test_a_request_whose_time_is_over_frees_its_sequence(engine: Subject) -> None:
    with pytest.raises(DeadlineExceeded):
        await engine.engine.generate(COMPLETIONS, engine.body(max_tokens=engine.longest), 0.2)
    assert await engine.is_idle_within(_half(engine))


def _half(engine: Subject) -> float:
    """Half of the seconds that the longest completion takes: what is over by then was not merely finished."""
    return max(1.0, engine.longest / engine.tokens_per_s / 2)
