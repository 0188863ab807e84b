"""The steps of the simulated engine: what of prompts and completions one step takes."""

import asyncio

from engines.config import SimConfig
from sim.model import SimModel
from sim.scheduler import Sample, SimScheduler

READ_PER_S = 1000.0


def sample(prompt_tokens: int) -> Sample:
    return Sample(
        request_id="a", index=0, prompt=[5] * prompt_tokens, context=0, draw=0, max_tokens=100, min_tokens=0,
        ignore_eos=True, prompt_blocks=[], reads_cache=False, report_every=100, report_at=100, reports=asyncio.Queue(),
    )  # fmt: skip


def steps(scheduler: SimScheduler, count: int) -> list[float]:
    """Take so many steps; return their seconds."""
    seconds = []
    for _ in range(count):
        seconds.append(scheduler._begin_step())
        scheduler._end_step()
    return seconds


def played(max_num_batched_tokens: int) -> SimScheduler:
    sim = SimConfig(prefill_tokens_per_s=READ_PER_S, decode_step_s=0.0, decode_step_per_seq_s=0.0)
    return SimScheduler(sim, SimModel.of(sim), max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)


def test_a_long_prompt_is_read_in_steps_each_of_which_makes_a_token_of_those_that_run() -> None:
    scheduler, running, late = played(101), sample(10), sample(250)
    scheduler.add([running])
    assert steps(scheduler, 1) == [0.01]
    scheduler.add([late])
    assert steps(scheduler, 4) == [0.1, 0.1, 0.05, 0.0]
    assert (len(running.tokens), len(late.tokens)) == (5, 2)


def test_a_prompt_that_was_read_in_part_is_read_again_after_a_reset() -> None:
    scheduler, late = played(100), sample(150)
    scheduler.add([late])
    steps(scheduler, 1)
    assert scheduler.reset_prefix_cache(preempt=True)
    assert steps(scheduler, 2) == [0.1, 0.05]
    assert len(late.tokens) == 1
