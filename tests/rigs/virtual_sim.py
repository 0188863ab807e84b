"""The simulated engine in virtual time: what a batch costs on it, exactly and at once, without a process or a clock."""

import asyncio

from engines.config import SimConfig
from sim.model import SimModel
from sim.scheduler import Sample, SimScheduler, block_hashes


def batch_s(
    sim: SimConfig, *, prompts: int, prompt_tokens: int, tokens: int, samples: int = 1, max_num_seqs: int = 1024,
    **limits: int,
) -> float:  # fmt: skip
    """Seconds of a batch that arrives at once. `limits` are those of `SimScheduler`."""
    scheduler = SimScheduler(sim, SimModel.of(sim), max_num_seqs, **limits)
    for index in range(prompts):
        scheduler.add(_sample(index, sample, prompt_tokens, tokens) for sample in range(samples))
    total = 0.0
    while scheduler.running or scheduler.waiting:
        total += scheduler._begin_step()
        scheduler._end_step()
    return total


def _sample(prompt_index: int, index: int, prompt_tokens: int, tokens: int) -> Sample:
    prompt = [3 + prompt_index % 900] * prompt_tokens
    return Sample(
        request_id=str(prompt_index), index=index, prompt=prompt, context=index, draw=index, max_tokens=tokens,
        min_tokens=0, ignore_eos=True, prompt_blocks=block_hashes(prompt, str(prompt_index)), reads_cache=True,
        report_every=1000, report_at=1000, reports=asyncio.Queue(),
    )  # fmt: skip
