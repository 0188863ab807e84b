"""The page about a run: what it says, and that it loads nothing."""

from html.parser import HTMLParser

import pytest

from loadtests.report.figures import figures
from loadtests.report.page import Report, page
from loadtests.report.series import Measures, Phase
from loadtests.report.thresholds import Threshold


class Page(HTMLParser):
    """The text of a page, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def measured() -> tuple[Measures, list[Phase]]:
    """Nine seconds: first tokens after 0.1 s, and after 0.4 s in the last three."""
    measures = Measures()
    for second in range(9):
        measures.record("ttft_s", 0.4 if second > 5 else 0.1, at=1000.0 + second)
        measures.record("completion_s", 1.0, at=1000.0 + second)
        measures.record("tokens", 50.0, at=1000.0 + second)
    measures.record("update_s", 0.3, at=1004.0)
    measures.ended = 1009.0
    return measures, [Phase("first", 1000, 1003), Phase("middle", 1003, 1006), Phase("last", 1006, 1009)]


def report(*thresholds: Threshold, problems: list[str] | None = None) -> Report:
    measures, phases = measured()
    told = figures(measures, phases)
    return Report(
        title="Load test: soak",
        settings={"max-tokens": "<64>"},
        figures=told,
        measures=measures,
        phases=phases,
        verdicts=[threshold.judge(told) for threshold in thresholds],
        problems=problems or [],
    )


def test_figures_of_phases_and_their_drift() -> None:
    told = figures(*measured())
    assert told["tokens_per_s"] == 50
    assert (told["first.ttft_s.p50"], told["last.ttft_s.p50"]) == (0.1, 0.4)
    assert told["drift.ttft_s.p50"] == pytest.approx(4)
    assert told["drift.tokens_per_s"] == 1


def test_a_page_has_the_verdict_and_loads_nothing() -> None:
    text = page(report(Threshold("ttft_s.p99", 0.2, True), Threshold("failures", 0, True)))
    found = Page(text)
    assert found.links == []
    assert "url(" not in text
    assert "Failed" in found.text
    assert "MISSED  ttft_s.p99 = 0.4, at most 0.2: over by 0.2, 100%" in found.text
    assert "Drift: last phase by the first" in found.text
    assert "<64>" in found.text  # written as text
    assert text.count("<svg") == 3  # tokens/s, first tokens, completions
    assert text.count('class="mark"') == 3


def test_a_run_that_met_everything_passed() -> None:
    assert report(Threshold("failures", 0, True)).passed
    assert "Passed" in Page(page(report(Threshold("failures", 0, True)))).text
    failed = report(problems=["2 failures"])
    assert not failed.passed
    assert "2 failures" in Page(page(failed)).text
