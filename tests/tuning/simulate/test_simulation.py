"""Workloads on the gateway's own fleet and scheduler, with modelled engines."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.config.schema import Config
from gateway.fleet.placement import scheduler as gateways_own
from gateway.fleet.placement.routing import has_room
from tuning.plan.workload import Lengths
from tuning.simulate.bound import bound_s
from tuning.simulate.outcome import Outcome
from tuning.simulate.placements import by_the_gateway, in_turn, without_lengths
from tuning.simulate.pool import Pool
from tuning.simulate.simulation import simulated
from tuning.simulate.speed import SetSpeed
from tuning.simulate.workloads.agents import Agents
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Ask, Workload

SPEED = SetSpeed(
    max_num_seqs=16, kv_tokens=50_000, base_s=0.007, sequence_s=0.00003, context_s=0.0, prefill_token_s=5e-5
)


def config(replicas: int = 4, **gateway: Any) -> Config:
    engine = {"kind": "sim", "num_replicas": replicas, "max_num_seqs": SPEED.max_num_seqs}
    return Config.model_validate({"engine": engine, "gateway": gateway})


def log_normal(mean: float, longest: int) -> LogNormal:
    return LogNormal(Lengths(mean, longest), 1.0)


GRPO = Grpo(prompts=40, samples=4, batches=2, epochs=2, prompt=log_normal(100, 400), response=log_normal(200, 2000))
AGENTS = Agents(
    users=80, rounds=2, turns=5, first=log_normal(400, 1600), response=log_normal(60, 400), tool=log_normal(300, 1600),
    tool_s=1.0, max_context=8000,
)  # fmt: skip


def test_a_seed_draws_the_same_workload_each_time_and_another_seed_another() -> None:
    for workload in (GRPO, AGENTS):
        assert workload.stream(3) == workload.stream(3)
        assert workload.stream(3) != workload.stream(4)


def test_a_workload_takes_the_same_virtual_time_each_time() -> None:
    workload = Workload([AGENTS.stream(0)])
    first, second = (simulated(config(), {"engine": SPEED}, workload, by_the_gateway) for _ in range(2))
    assert first == second


def test_lengths_have_their_mean_and_are_cut_at_the_longest() -> None:
    groups = [chain[0] for phase in GRPO.stream(0) for chain in phase]
    lengths = [length for group in groups for length in group.lengths]
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.15)
    assert max(lengths) <= 2000


def test_an_epoch_has_the_prompts_of_the_one_before_with_lengths_alike() -> None:
    means: list[dict[int, float]] = [{}, {}]
    for index, phase in enumerate(GRPO.stream(0)):
        means[index // 2] |= {group.text: sum(group.lengths) for (group,) in phase}
    assert means[0].keys() == means[1].keys()
    texts = sorted(means[0], key=means[0].__getitem__)
    short, long = texts[:20], texts[-20:]
    assert sum(means[1][text] for text in long) > 2 * sum(means[1][text] for text in short)


def test_a_turn_begins_with_all_that_its_session_has_said() -> None:
    (phase,) = AGENTS.stream(0)
    for chain in phase:
        for before, ask in pairwise(chain):
            if ask.session == before.session:
                assert ask.known == before.prompt + before.lengths[0] < ask.prompt
            else:
                assert ask.known == 0


def test_rollouts_are_placed_by_the_gateways_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that never falls on the second of two replicas leaves it idle."""
    chosen: list[str] = []

    def first(rollout: Any, replicas: Any, *_: Any) -> Any:
        chosen.append(rollout.request_id)
        mine = [replica for replica in replicas if replica.replica_id == "engine-0000"]
        return (mine[0], "the first") if mine and has_room(rollout, mine[0]) else None

    workload = Workload([GRPO.stream(0)])
    before = simulated(config(2), {"engine": SPEED}, workload, by_the_gateway)
    monkeypatch.setattr(gateways_own, "choose", first)
    after = simulated(config(2), {"engine": SPEED}, workload, by_the_gateway)
    assert len(chosen) >= sum(1 for _ in workload.asks())
    assert after.makespan_s > 1.3 * before.makespan_s
    assert after.busy <= 0.5 + 1e-9  # sums of the clock's times


def test_sessions_that_stick_find_their_prefix_and_round_robin_does_not() -> None:
    workload = Workload([AGENTS.stream(0)])
    ours = simulated(config(), {"engine": SPEED}, workload, by_the_gateway)
    theirs = simulated(config(), {"engine": SPEED}, workload, in_turn)
    assert ours.found > theirs.found
    assert ours.tokens == theirs.tokens == sum(sum(ask.lengths) for ask in workload.asks())


@pytest.mark.parametrize("workload", [GRPO, AGENTS], ids=["grpo", "agents"])
def test_no_placement_beats_the_bound(workload: Grpo | Agents) -> None:
    for placed in (by_the_gateway, in_turn):
        assert simulated(config(), {"engine": SPEED}, Workload([workload.stream(1)]), placed).over_bound >= 1


def test_a_lone_sample_takes_the_bound() -> None:
    ask = Ask(request="one", text=1, prefix=1, prompt=100, lengths=(500,), limit=500)
    outcome = simulated(config(), {"engine": SPEED}, Workload([[[[ask]]]]), by_the_gateway)
    assert outcome.makespan_s == pytest.approx(bound_s(Workload([[[[ask]]]]), [SPEED] * 4), rel=1e-3)
    assert outcome.p99_s == pytest.approx(500 * 0.00703 + 100 * 5e-5)


def test_a_sample_that_fits_into_no_cache_is_refused_with_what_to_change() -> None:
    ask = Ask(request="one", text=1, prefix=1, prompt=49_000, lengths=(2000,), limit=2000)
    with pytest.raises(ConfigError, match=r"51000 tokens with its prompt.*holds 50000.*shorter.*kv_tokens"):
        simulated(config(), {"engine": SPEED}, Workload([[[[ask]]]]), by_the_gateway)


def test_rollouts_wait_for_as_long_as_engines_work_and_those_that_a_gateway_gives_up_are_counted() -> None:
    batch = [
        [Ask(request="batch", text=text, prefix=text, prompt=100, lengths=(1000,) * 32, limit=1000)]
        for text in range(8)
    ]
    patient, strict = (
        simulated(config(1, queue_timeout_s=5.0, **bound), {"engine": SPEED}, Workload([[batch]]), by_the_gateway)
        for bound in ({}, {"generate_timeout_s": 10.0})
    )
    assert patient.p99_s > 8 * 2 * 7
    assert (patient.late, strict.late) == (0, 8)


def test_replicas_of_two_speeds_share_the_work_and_the_fastest_has_the_longest_chain() -> None:
    fast = SetSpeed(
        max_num_seqs=16, kv_tokens=50_000, base_s=0.0035, sequence_s=0.000015, context_s=0.0, prefill_token_s=2.5e-5
    )
    batch = Workload([[[[Ask(request="one", text=1, prefix=1, prompt=100, lengths=(500,), limit=500)]]]])
    assert bound_s(batch, [SPEED, fast]) == bound_s(batch, [fast])
    many = Workload([GRPO.stream(0)])
    assert bound_s(many, [fast]) == pytest.approx(bound_s(many, [SPEED]) / 2)


SHORT = replace(SPEED, kv_tokens=10_000)
"""The contexts of 20 sessions a replica are more than its KV."""


def by_kv_and_all_at_once(speed: SetSpeed, share: float = 1.0, **agents: Any) -> tuple[Outcome, Outcome]:
    """The outcomes with admission and without it, of agents whose sessions are longer than the looks at engines."""
    workload = Workload([replace(AGENTS, rounds=6, **agents).stream(0)])
    with_it, without = (
        simulated(config(session_kv_share=share), {"engine": speed}, workload, by_the_gateway)
        for share in (share, None)
    )
    return with_it, without


@pytest.mark.parametrize("prefill_token_s", [5e-4, 1e-3])
def test_sessions_wait_for_kv_where_reading_contexts_again_is_dear(prefill_token_s: float) -> None:
    speed = replace(SHORT, prefill_token_s=prefill_token_s)
    by_kv, all_at_once = by_kv_and_all_at_once(speed)
    assert by_kv.found > 1.5 * all_at_once.found
    assert by_kv.makespan_s < 0.85 * all_at_once.makespan_s


@pytest.mark.parametrize("prefill_token_s", [1e-6, 1e-5])
@pytest.mark.parametrize("tool_s", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("kv_tokens", [10_000, 100_000])
def test_admission_costs_nothing_where_reading_is_cheap_or_all_contexts_fit(
    prefill_token_s: float, tool_s: float, kv_tokens: int
) -> None:
    speed = replace(SHORT, prefill_token_s=prefill_token_s, kv_tokens=kv_tokens)
    by_kv, all_at_once = by_kv_and_all_at_once(speed, tool_s=tool_s)
    assert by_kv.makespan_s < 1.03 * all_at_once.makespan_s


def test_ends_that_agents_report_make_room_for_others() -> None:
    """Without reports an ended session counts until its idle limit."""
    dear, patient = replace(SHORT, prefill_token_s=1e-3), config(session_kv_share=0.85, session_idle_s=1000.0)

    def seconds(*, reports_ends: bool) -> float:
        source = replace(AGENTS, rounds=6, tool_s=4.0, reports_ends=reports_ends)
        workloads = (Workload([source.stream(seed)]) for seed in range(3))
        return sum(simulated(patient, {"engine": dear}, one, by_the_gateway).makespan_s for one in workloads)

    assert seconds(reports_ends=True) < seconds(reports_ends=False)


def test_the_scheduler_learns_the_lengths_of_an_epoch_for_the_next() -> None:
    workload = Workload([replace(GRPO, prompts=120, batches=1).stream(0)])
    learned, unknown = (
        simulated(config(), {"engine": SPEED}, workload, placed) for placed in (by_the_gateway, without_lengths)
    )
    assert learned.makespan_s < 0.97 * unknown.makespan_s


@pytest.mark.parametrize("pool", [None, Pool(4)])
def test_groups_in_parts_make_the_same_tokens_and_level_the_replicas(pool: Pool | None) -> None:
    """Two groups of eight on four replicas: whole groups leave two of them without work."""
    groups = Grpo(prompts=2, samples=8, batches=2, epochs=1, prompt=log_normal(10, 20), response=log_normal(200, 2000))
    slow = {"engine": replace(SPEED, sequence_s=0.002)}
    whole, parts = (
        simulated(config(samples_together=together), slow, Workload([groups.stream(0)]), by_the_gateway, pool)
        for together in (None, 2)
    )
    assert parts.tokens == whole.tokens
    if pool is None:
        assert parts.makespan_s < whole.makespan_s
        assert parts.p99_s < whole.p99_s
