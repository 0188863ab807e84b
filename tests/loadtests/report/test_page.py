"""The page about a run: what it says, and that it loads nothing."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from loadtests.report.charts import Line, chart
from loadtests.report.figures import figures
from loadtests.report.page import Report, page
from loadtests.report.series import Measures, Phase
from loadtests.report.thresholds import Threshold

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Text and structure of a page; raises where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing to close."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

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


def test_a_chart_is_drawn_to_scale() -> None:
    drawn = ElementTree.fromstring(chart([Line("p50", [(0, 0), (5, 20), (10, 40)], 0)], seconds=10.0))
    polyline = drawn.find("polyline")
    assert polyline is not None
    points = [tuple(map(float, point.split(","))) for point in polyline.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert [text.text for text in drawn.iter("text")][:5] == ["0", "10", "20", "30", "40"]
