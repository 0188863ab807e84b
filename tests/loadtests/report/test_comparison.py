"""A run beside an earlier one."""

from pathlib import Path

import pytest

from loadtests.report.comparison import compared, read_figures

EARLIER = {"tokens_per_s": 100.0, "failures": 0.0, "ttft_s.p50": 0.2, "ttft_s.p99": 0.4, "gone_s.p50": 1.0}
NOW = {"tokens_per_s": 150.0, "failures": 2.0, "ttft_s.p50": 0.1, "new_s.p50": 1.0}


def test_figures_of_both_runs_are_set_beside_each_other() -> None:
    rows = compared(EARLIER, NOW, {"ttft_s": "First token", "gone_s": "", "new_s": ""})
    assert [(row.figure, row.earlier, row.now, row.ratio) for row in rows] == [
        ("tokens_per_s", 100, 150, 1.5),
        ("failures", 0, 2, None),
        ("ttft_s.p50", 0.2, 0.1, 0.5),
    ]
    assert str(rows[0]).split() == ["tokens_per_s", "100", "->", "150,", "1.50", "times"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("[1]", "no figures of a run"), ("{", "no JSON"), ('{"a": 1}', "no figures"), (None, "No such file")],
)
def test_a_file_without_figures_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "earlier.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_figures(path)
