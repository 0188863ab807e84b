"""Bars on standard error: they count what ended, and end with the block."""

import pytest

from trainer_client import Progress, progress_bar


def test_a_bar_counts_prompts_and_tells_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("evaluation") as show:
        for delivered in (1, 2):
            show(Progress(num_prompts=3, delivered=delivered, failed=1, cancelled=0, tokens=5_000, seconds=2.0))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "evaluation" in shown.err
    assert "3/3" in shown.err
    assert "2,500 tokens/s, 1 failed" in shown.err
