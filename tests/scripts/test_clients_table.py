"""The table of clients in README.md: what the results say, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.studies.client_records import ClientRun, write_record
from scripts.clients_table import BEGIN, END, README, read_results, table, with_table

RUN = ClientRun(client="Some Client", version="1.0", ran="a batch", against="2 engines")


def test_readme_has_the_table_that_the_results_make() -> None:
    page = README.read_text(encoding="utf-8")
    assert page == with_table(page, table(read_results())), "python -m scripts.clients_table"


def test_a_row_tells_client_version_run_and_result(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, "test_one", "passed", ["ratio 1.001"])
    write_record(tmp_path, RUN, "test_two", "failed", ["ratio 1.0", "12 tokens/s"])
    (found,) = read_results(tmp_path)
    assert found["facts"] == ["ratio 1.0", "12 tokens/s"]
    row = table([found]).splitlines()[-1]
    assert row.startswith("| Some Client | 1.0 | 2 engines | a batch | 1 of 2 checks; ratio 1.0; 12 tokens/s |")


def test_one_check_is_yes_or_no(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, "test_one", "passed", [])
    assert "| yes |" in table(read_results(tmp_path))
    write_record(tmp_path, RUN, "test_one", "failed", [])
    assert "| **no** |" in table(read_results(tmp_path))


def test_another_version_of_the_client_begins_anew(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, "test_one", "failed", [])
    write_record(tmp_path, replace(RUN, version="2.0"), "test_two", "passed", [])
    found = json.loads((tmp_path / "some-client.json").read_text())
    assert found["checks"] == {"test_two": "passed"}


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        with_table("# Page", "rows")
    assert with_table(f"a\n{BEGIN}old\n{END}b\n", "rows\n") == f"a\n{BEGIN}rows\n{END}b\n"
