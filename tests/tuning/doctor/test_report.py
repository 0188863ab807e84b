"""Findings in print."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from tests.tuning.doctor.production import write_production
from tuning.doctor.finding import Finding
from tuning.doctor.report import as_json, print_findings
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    production = write_production(tmp_path_factory.mktemp("production"))
    return examine(subject_of(verl=FIXTURES / "inference.yaml", against=production))


def printed(findings: list[Finding], *, width: int, terminal: bool, with_fine: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system="standard", legacy_windows=False)
    print_findings(console, findings, with_fine=with_fine)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 250])
def test_a_terminal_gets_a_table_of_at_most_100_columns(findings: list[Finding], width: int) -> None:
    lines = Text.from_ansi(printed(findings, width=width, terminal=True, with_fine=True)).plain.splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert "gpu_memory_utilization" in "\n".join(lines)


def test_elsewhere_findings_are_plain_lines_that_are_not_folded(findings: list[Finding]) -> None:
    text = printed(findings, width=80, terminal=False)
    assert "\x1b" not in text
    (line,) = [line for line in text.splitlines() if "enforce_eager = true" in line]
    assert line.startswith("hurts: verl rollout: enforce_eager = true (")
    assert line.endswith("so batches may be of any size")


def test_what_is_fine_is_counted_and_shown_when_asked_or_where_it_corrects(findings: list[Finding]) -> None:
    text = printed(findings, width=100, terminal=False)
    assert text.endswith("4 that hurt, 1 to consider, 9 fine (--all shows them)\n")
    assert "top_k" not in text
    assert "does not bound concurrent sequences" in text
    assert "top_k" in printed(findings, width=100, terminal=False, with_fine=True)


def test_json_has_every_field_of_every_finding(findings: list[Finding]) -> None:
    told = as_json(findings)
    assert told["counts"] == {"hurts": 4, "consider": 1, "fine": 9}
    (memory,) = [one for one in told["findings"] if one["rule"] == "gpu-memory"]
    assert memory["severity"] == "hurts"
    assert memory["value"] == 0.5
    assert memory["place"].endswith("inference.yaml:9")
    assert memory["effect"] == "1.7 times the memory"
    assert memory["source"]


def test_advice_for_nearly_every_file_is_one_line_without_its_text(tmp_path: Path) -> None:
    found = examine(subject_of(verl=write_production(tmp_path)))
    general = [one for one in found if one.is_general]
    assert len(general) > 1
    (line,) = [line for line in printed(found, width=100, terminal=False).splitlines() if "worth a try" in line]
    assert all(one.key in line for one in general)
    assert general[0].why not in printed(found, width=100, terminal=False)
