"""The files of `tune`: the configuration it was given, with the best setting in it."""

from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import EngineKind
from gateway.config.load import load
from tuning.tune.levers import Setting
from tuning.tune.report import as_json, configuration, contributions, page, replicas_for
from tuning.tune.search import Outcome, Record

TINY_CPU = Path(__file__).parents[3] / "examples" / "tiny-cpu.yaml"
START = Setting((("max_num_seqs", 64),))
BEST = Setting((("max_num_seqs", 128),))


def outcome(best: Setting = BEST, start: Setting = START) -> Outcome:
    records = {
        start: Record([10.0, 12.0]),
        best: Record([20.0]),
        Setting((("max_num_seqs", 9),)): Record(failure="<no>"),
    }
    return Outcome(
        start=start, best=best, fastest=best, pairs=[(10.0, 20.0)], against=[(25.0, 20.0)],
        reason="2.000 times the tokens/s of the start", records=records, spent_s=5.0, settings=3,
    )  # fmt: skip


def written(folder: Path, file: Path, overrides: tuple[str, ...] = (), group: str = "engine") -> Path:
    config = load(file, overrides, environ={})
    (folder / "best.yaml").write_text(configuration(config, group, file, overrides, outcome()))
    return folder / "best.yaml"


def test_a_serve_document_becomes_a_plain_file_that_finds_its_model(tmp_path: Path) -> None:
    engine = load(written(tmp_path, TINY_CPU), environ={}).engine
    assert engine.max_num_seqs == 128
    assert engine.num_replicas == 2
    assert Path(engine.model).is_absolute()


def test_arguments_of_the_command_line_are_kept(tmp_path: Path) -> None:
    found = load(written(tmp_path, TINY_CPU, ("gateway.port=8222", "engine.num_replicas=3")), environ={})
    assert (found.gateway.port, found.engine.num_replicas, found.engine.max_num_seqs) == (8222, 3, 128)


def test_of_several_groups_the_one_that_was_tuned_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(
        "engine: {kind: sim}\nengines:\n  a: {max_num_seqs: 64}\n  b: {frozen: true, served_model_name: judge}\n"
    )
    groups = load(written(tmp_path, file, group="a"), environ={}).engines
    assert (groups["a"].max_num_seqs, groups["b"].max_num_seqs) == (128, 256)


def test_replicas_follow_the_tensor_parallel_size() -> None:
    four = EngineConfig(kind=EngineKind.SIM, num_replicas=4)
    assert replicas_for(four, four.model_copy(update={"tensor_parallel_size": 2})) == 2
    with pytest.raises(ConfigError, match="tensor_parallel_size = 8: 4 GPUs of 4 replicas cannot be dealt out"):
        replicas_for(four, four.model_copy(update={"tensor_parallel_size": 8}))


def test_the_page_shows_decision_runs_and_failures_and_escapes_what_engines_say() -> None:
    made = page(outcome(), "64 prompts", "engine: {}")
    assert "<h1>Take max_num_seqs=128</h1>" in made
    assert made.count("<circle") == 3
    assert "&lt;no&gt;" in made
    assert "failed" in made


def test_what_the_best_was_held_against_is_told() -> None:
    found = as_json(outcome())
    assert (found["against"], found["against_ratios"]) == ([{"known": 25.0, "best": 20.0}], [0.8])
    made = page(outcome(), "64 prompts", "engine: {}")
    assert "0.800 times the compared configuration&#x27;s tokens/s, in the same runs" in made
    assert "<th>held against<th>best<th>ratio" in made


def test_labels_of_the_plot_begin_at_its_edge_and_none_is_cut() -> None:
    long = Setting((("max_num_seqs", 128), ("a_lever_with_a_very_long_name_of_its_own", 123456), ("another_one", 7)))
    start = Setting(tuple((name, 1) for name, _ in long.values))
    found = outcome(long, start)
    found.records.clear()
    found.records.update({start: Record([1.0]), long: Record([2.0])})
    made = page(found, "64 prompts", "engine: {}")
    label = long.changes_text(start)
    assert f'<text x="0" y="14">{label}</text>' in made


def test_each_lever_has_its_own_part_of_the_gain() -> None:
    start, best = Setting((("a", 1), ("b", 1), ("c", 1))), Setting((("a", 2), ("b", 2), ("c", 2)))
    found = outcome(best, start)
    found.records.clear()
    speeds = {(1, 1, 1): 10.0, (2, 1, 1): 15.0, (2, 2, 1): 30.0, (2, 2, 2): 33.0}
    for values, speed in speeds.items():
        found.records[Setting(tuple(zip("abc", values, strict=True)))] = Record([speed])
    assert contributions(found) == [
        "a=2: 1.5 times the tokens/s by itself",
        "b=2: 2 times the tokens/s by itself",
        "c=2: 1.1 times the tokens/s by itself",
    ]
