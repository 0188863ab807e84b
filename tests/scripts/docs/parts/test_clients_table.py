"""The table of clients in docs/compatibility.md holds the kept results and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

from scripts.docs.parts.clients_table import read_results, table
from tests.running.client_records import ClientRun, write_record

RUN = ClientRun(client="Some Client", version="1.0", ran="a batch", against="2 engines")


def test_a_row_has_client_version_run_and_result(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, "test_one", "passed", ["ratio 1.001"])
    write_record(tmp_path, RUN, "test_two", "failed", ["ratio 1.0", "12 tokens/s"])
    (found,) = read_results(tmp_path)
    assert found["facts"] == ["ratio 1.0", "12 tokens/s"]
    row = table([found]).splitlines()[-1]
    assert row.startswith("| Some Client | 1.0 | 2 engines | a batch | 1 of 2 checks; ratio 1.0; 12 tokens/s |")


def test_another_version_of_a_client_starts_a_new_record(tmp_path: Path) -> None:
    write_record(tmp_path, RUN, "test_one", "failed", [])
    write_record(tmp_path, replace(RUN, version="2.0"), "test_two", "passed", [])
    found = json.loads((tmp_path / "some-client.json").read_text())
    assert found["checks"] == {"test_two": "passed"}
