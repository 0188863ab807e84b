"""The cost of a step of the simulated engine, in virtual time."""

import pytest

from engines.config import SimConfig
from tests.rigs.virtual_sim import batch_s

BARE = SimConfig(decode_step_s=0.002, decode_step_per_seq_s=0, prefill_tokens_per_s=1e9)


async def test_a_step_of_more_sequences_than_have_a_graph_takes_longer() -> None:
    sim = BARE.model_copy(update={"eager_step_s": 0.01})
    assert batch_s(sim, prompts=8, prompt_tokens=1, tokens=10, graph_seqs=8) == pytest.approx(0.02, rel=0.01)
    assert batch_s(sim, prompts=9, prompt_tokens=1, tokens=10, graph_seqs=8) == pytest.approx(0.12, rel=0.01)
    assert batch_s(sim, prompts=1, prompt_tokens=1, tokens=10, graph_seqs=0) == pytest.approx(0.12, rel=0.01)


async def test_prompts_are_read_in_steps_of_max_num_batched_tokens() -> None:
    sim = BARE.model_copy(update={"prefill_step_s": 0.1})
    one = batch_s(sim, prompts=10, prompt_tokens=100, tokens=1, max_num_batched_tokens=1000)
    four = batch_s(sim, prompts=10, prompt_tokens=100, tokens=1, max_num_batched_tokens=250)
    assert four - one == pytest.approx(0.3)
