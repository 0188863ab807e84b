"""The page about a run: what it says, and that it loads nothing."""

from html.parser import HTMLParser

from loadtests.report.figures import figures
from loadtests.report.page import Report, page
from loadtests.report.series import Measures, Phase
from loadtests.report.thresholds import Threshold


class Page(HTMLParser):
    """The text of a page, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def report(*thresholds: Threshold, problems: tuple[str, ...] = ()) -> Report:
    """Nine seconds with first tokens, completions, tokens and an update."""
    measures = Measures()
    for second in range(9):
        for name, value in (("ttft_s", 0.4), ("completion_s", 1.0), ("tokens", 50.0)):
            measures.record(name, value, at=1000.0 + second)
    measures.record("update_s", 0.3, at=1004.0)
    measures.ended = 1009.0
    phases = [Phase("first", 1000, 1003), Phase("middle", 1003, 1006), Phase("last", 1006, 1009)]
    told = figures(measures, phases)
    verdicts = [threshold.judge(told) for threshold in thresholds]
    given = {"settings": {"max-tokens": "<64>"}, "phases": phases, "verdicts": verdicts, "problems": problems}
    return Report(title="Load test: soak", figures=told, measures=measures, **given)  # type: ignore[arg-type]


def test_a_page_has_the_verdict_and_loads_nothing() -> None:
    text = page(report(Threshold("ttft_s.p99", 0.2, True), Threshold("failures", 0, True)))
    found = Page(text)
    assert found.links == []
    assert "url(" not in text
    assert "Failed" in found.text
    assert "MISSED  ttft_s.p99 = 0.4, at most 0.2: over by 0.2, 100%" in found.text
    assert "9 completions, 0 failures, 50 tokens/s over 9.0 s" in found.text
    assert "<64>" in found.text  # written as text
    assert text.count("<svg") == 3  # tokens/s, first tokens, completions
    assert text.count('class="mark"') == 3


def test_a_run_that_met_everything_passed() -> None:
    assert "Passed" in Page(page(report(Threshold("failures", 0, True)))).text
    failed = Page(page(report(problems=("2 failures",)))).text
    assert "Failed" in failed
    assert "2 failures" in failed
