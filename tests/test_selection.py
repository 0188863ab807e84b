"""Files that a run has no test of are not imported."""

import pytest

from tests.running.selection import may_choose

UNITS = "not (vllm or ray or slow)"


@pytest.mark.parametrize(
    ("expression", "marks", "is_chosen"),
    [
        (UNITS, set(), True),
        (UNITS, {"vllm"}, False),
        ("vllm and not slow", {"vllm"}, True),
        ("vllm and not slow", {"vllm", "slow"}, False),
        ("vllm and not slow", set(), True),  # single tests of it may be marked
        ("slow", {"vllm"}, True),
        ("ray and not (vllm or slow)", {"ray", "vllm"}, False),
    ],
)
def test_a_file_is_left_out_where_none_of_its_tests_can_be_chosen(
    expression: str, marks: set[str], is_chosen: bool
) -> None:
    names = {name for name in ("vllm", "ray", "slow") if name in expression}
    assert may_choose(expression, marks, names) is is_chosen
