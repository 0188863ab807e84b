"""Findings in print."""

import io
from pathlib import Path

import pytest
from rich.console import Console

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


def printed(findings: list[Finding]) -> str:
    out = io.StringIO()
    print_findings(Console(file=out, width=80), findings)
    return out.getvalue()


def test_findings_are_plain_lines_that_are_not_folded(findings: list[Finding]) -> None:
    text = printed(findings)
    (line,) = [line for line in text.splitlines() if "enforce_eager = true" in line]
    assert line.startswith("hurts: verl rollout: enforce_eager = true (")
    assert line.endswith("so batches may be of any size")
    assert "does not bound concurrent sequences" in text
    assert text.endswith("4 that hurt, 1 to consider\n")


def test_json_has_every_field_of_every_finding(findings: list[Finding]) -> None:
    told = as_json(findings)
    assert told["counts"] == {"hurts": 4, "consider": 1, "fine": 1}
    (memory,) = [one for one in told["findings"] if one["rule"] == "gpu-memory"]
    assert memory["severity"] == "hurts"
    assert memory["value"] == 0.5
    assert memory["place"].endswith("inference.yaml:9")
    assert memory["effect"] == "1.7 times the memory"
    assert memory["source"]
