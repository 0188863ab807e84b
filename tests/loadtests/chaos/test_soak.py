"""A soak in short, and its judgement of drift."""

import pytest

from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.soak import Look, Soak, main


def soaked(rss_mb: float) -> Soak:
    """A soak whose memory ends at `rss_mb`, from 200 on."""
    return Soak([Look(float(at), 200.0 if at < 75 else rss_mb, 40, 9, 30, 1.0) for at in range(101)], Tally())


def test_steady_figures_have_not_grown() -> None:
    assert soaked(219.0).grown() == []


def test_memory_that_grows_is_named_with_both_quarters() -> None:
    assert soaked(260.0).grown() == ["rss_mb grew from 200 to 260"]


@pytest.mark.slow
@pytest.mark.load
def test_five_minutes_lose_nothing_and_leak_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--minutes", "5"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "lost 0, duplicated 0, stale 0, wrong 0, hung 0" in said
