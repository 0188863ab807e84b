"""The grid of fleets and agents on which admission by KV is compared with none."""

import pytest

from loadtests.studies.scheduling.admission import Case, grid, ratios_of


def test_the_grid_has_as_many_cases_as_its_help_says_and_each_once() -> None:
    assert len(grid()) == len(set(grid())) == 1920


def test_admission_changes_nothing_where_all_contexts_fit() -> None:
    roomy = Case(
        sessions=8, tool_s=0.2, prefill_tokens_per_s=1_000_000, kv_tokens=3_000_000, max_num_seqs=64, has_batches=False
    )
    assert ratios_of(roomy, 1.0, range(1)) == pytest.approx([1.0])
