"""The file that a run goes on from."""

import json
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind
from tuning.tune.bench import Measured
from tuning.tune.journal import Journal
from tuning.tune.levers import Setting

SETTING = Setting((("max_num_seqs", 8), ("max_num_batched_tokens", None)))
ENGINES = {"start": EngineConfig(kind=EngineKind.SIM), "fastest": EngineConfig(kind=EngineKind.SIM, max_num_seqs=8)}
ROUND = {"start": 1.0, "fastest": 2.0}
SUBJECT = {"engine": {"kind": "sim"}, "levers": {"max_num_seqs": (8, 16)}}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out" / "journal.jsonl", SUBJECT)
    journal.add_measured(SETTING, Measured(speeds=(1.5,), start_s=2.0, run_s=3.0), 10.0)
    journal.add_round(SETTING, ENGINES, ROUND, 20.0)
    again = Journal(tmp_path / "out" / "journal.jsonl", SUBJECT)
    assert json.dumps(again.entries) == json.dumps(journal.entries)
    assert again.spent_s == 20.0


def test_half_a_line_of_a_run_that_was_killed_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    Journal(file, SUBJECT).add_round(SETTING, ENGINES, ROUND, 20.0)
    with file.open("a") as stream:
        stream.write('{"setting": {"max_num')
    journal = Journal(file, SUBJECT)
    assert len(journal.entries) == 1
    journal.add_round(SETTING, ENGINES, ROUND, 30.0)
    assert [json.loads(line)["at_s"] for line in file.read_text().splitlines()[1:]] == [20.0, 30.0]


def test_a_journal_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    Journal(file, SUBJECT).add_round(SETTING, ENGINES, ROUND, 20.0)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="it was begun with another levers; give another --out folder"):
        Journal(file, SUBJECT | {"levers": {"max_num_seqs": (8,)}})
    assert file.read_bytes() == before


def test_final_runs_are_those_of_the_same_engines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", SUBJECT)
    journal.add_round(SETTING, ENGINES, ROUND, 20.0)
    elsewhere = {role: engine.model_copy(update={"log_dir": "/elsewhere"}) for role, engine in ENGINES.items()}
    assert journal.rounds(SETTING, elsewhere) == [ROUND]
    assert journal.rounds(SETTING, ENGINES | {"against": ENGINES["start"]}) == []
    assert journal.rounds(Setting((("max_num_seqs", 9),)), ENGINES) == []
