"""The states in which the CPU of a placement is counted; each is checked by the study itself after its rollouts."""

import asyncio

import pytest

from loadtests.studies.gateway_cost import placement_cpu
from loadtests.studies.gateway_cost.placement_cpu import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.state}{', sessions' * case.has_sessions}")
def test_a_state_holds_while_rollouts_are_placed_in_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_cpu, "_WAITING", 40)
    assert asyncio.run(placement_cpu._measured(case, 2, 16)) > 0
