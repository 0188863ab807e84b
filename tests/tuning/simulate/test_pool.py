"""Batches out of a pool in virtual time, beside batches that wait for all of their groups."""

import pytest

from tests.tuning.simulate.test_simulation import SPEED, config, log_normal
from tuning.simulate.outcome import Outcome
from tuning.simulate.placements import by_the_gateway
from tuning.simulate.pool import Pool
from tuning.simulate.simulation import simulated
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.workload import Stream, Workload

PROMPTS, BATCHES = 16, 6
GRPO = Grpo(
    prompts=PROMPTS,
    samples=4,
    batches=BATCHES,
    epochs=1,
    prompt=log_normal(100, 400),
    response=log_normal(200, 2000),
)


def played(stream: Stream, pool: Pool | None = None) -> Outcome:
    return simulated(config(), {"engine": SPEED}, Workload([stream]), by_the_gateway, pool)


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_a_batch_s_size_is_the_batch(seed: int) -> None:
    stream = GRPO.stream(seed)
    plain, pool = played(stream), played(stream, Pool(PROMPTS))
    assert pool.makespan_s == pytest.approx(plain.makespan_s)
    assert (pool.tokens, pool.longest_lag, pool.again) == (plain.tokens, 0, plain.again)


@pytest.mark.parametrize("seed", range(3))
def test_a_larger_pool_takes_less_time_for_a_token_and_its_groups_go_on(seed: int) -> None:
    stream = GRPO.stream(seed)
    plain, pool = played(stream), played(stream, Pool(2 * PROMPTS))
    assert pool.makespan_s < 0.75 * plain.makespan_s
    assert pool.tokens_per_s > plain.tokens_per_s
    assert pool.longest_lag >= 1
    assert pool.again > 0  # what was made under other weights is read again


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_group_is_older_than_the_bound(max_staleness: int) -> None:
    stream = GRPO.stream(0)
    free, bound = played(stream, Pool(2 * PROMPTS)), played(stream, Pool(2 * PROMPTS, max_staleness))
    assert bound.longest_lag == max_staleness < free.longest_lag
    assert free.makespan_s < bound.makespan_s < played(stream).makespan_s


def test_each_batch_takes_another_group() -> None:
    """Three batches of one group each, out of a pool of two groups: all is delivered but what the third batch left."""
    stream = [[[chain[0]]] for chain in GRPO.stream(0)[0][:3]]
    groups = [phase[0][0].lengths for phase in stream]
    pool = played(stream, Pool(2))
    assert pool.tokens in {sum(sum(lengths) for lengths in taken) for taken in _threes(groups)}


def _threes(groups: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """The groups that three batches may take of a pool that reads them again and again."""
    read = [*groups, groups[0]]  # with the last batch two are open, and four were read
    return [[*read[:left], *read[left + 1 :]] for left in range(4)]
