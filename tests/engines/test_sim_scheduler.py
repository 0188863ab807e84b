"""What a step of the simulated engine costs, in virtual time."""

import asyncio

import pytest

from engines.config import SimConfig
from engines.sim_model import SimModel
from engines.sim_scheduler import Sample, SimScheduler, block_hashes


def seconds(
    sim: SimConfig, *, samples: int, prompt_tokens: int, tokens: int, max_num_seqs: int = 1024, **limits: int
) -> float:
    """What a batch takes that arrives at once."""
    scheduler = SimScheduler(sim, SimModel.of(sim), max_num_seqs, **limits)
    scheduler.add(_sample(index, prompt_tokens, tokens) for index in range(samples))
    total = 0.0
    while scheduler.running or scheduler.waiting:
        total += scheduler._begin_step()
        scheduler._end_step()
    return total


def _sample(index: int, prompt_tokens: int, tokens: int) -> Sample:
    prompt = [3 + index % 900] * prompt_tokens
    return Sample(
        request_id=str(index), index=0, prompt=prompt, context=index, draw=index, max_tokens=tokens, min_tokens=0,
        ignore_eos=True, prompt_blocks=block_hashes(prompt, str(index)), reads_cache=True, report_every=1000,
        report_at=1000, reports=asyncio.Queue(),
    )  # fmt: skip


BARE = SimConfig(decode_step_s=0.002, decode_step_per_seq_s=0, prefill_tokens_per_s=1e9)


async def test_a_step_of_more_sequences_than_have_a_graph_takes_longer() -> None:
    sim = BARE.model_copy(update={"eager_step_s": 0.01})
    assert seconds(sim, samples=8, prompt_tokens=1, tokens=10, graph_seqs=8) == pytest.approx(0.02, rel=0.01)
    assert seconds(sim, samples=9, prompt_tokens=1, tokens=10, graph_seqs=8) == pytest.approx(0.12, rel=0.01)
    assert seconds(sim, samples=1, prompt_tokens=1, tokens=10, graph_seqs=0) == pytest.approx(0.12, rel=0.01)


async def test_prompts_are_read_in_steps_of_max_num_batched_tokens() -> None:
    sim = BARE.model_copy(update={"prefill_step_s": 0.1})
    one = seconds(sim, samples=10, prompt_tokens=100, tokens=1, max_num_batched_tokens=1000)
    four = seconds(sim, samples=10, prompt_tokens=100, tokens=1, max_num_batched_tokens=250)
    assert four - one == pytest.approx(0.3)
