"""The files of `tune`: the configuration it was given, with the best setting in it."""

from pathlib import Path

from gateway.config.load import load
from tuning.tune.report import configuration
from tuning.tune.search import Outcome, Record

TINY_CPU = Path(__file__).parents[3] / "examples" / "tiny-cpu.yaml"
BEST = {"max_num_seqs": 128}
OUTCOME = Outcome(
    best=BEST, favoured=BEST, reason="2.000 times the start's tokens/s", pairs=[(10.0, 20.0)], spent_s=5.0, untried=2,
    records=[Record({}, [10.0, 12.0]), Record(BEST, [22.0]), Record({"max_num_seqs": 9}, failure="no\nmemory")],
)  # fmt: skip


def written(folder: Path, file: Path, overrides: tuple[str, ...] = (), group: str = "engine") -> Path:
    config = load(file, overrides, environ={})
    (folder / "best.yaml").write_text(configuration(config, group, file, overrides, OUTCOME))
    return folder / "best.yaml"


def test_a_serve_document_becomes_a_plain_file_that_finds_its_model_and_keeps_arguments(tmp_path: Path) -> None:
    found = load(written(tmp_path, TINY_CPU, ("gateway.port=8222", "engine.num_replicas=3")), environ={})
    assert (found.gateway.port, found.engine.num_replicas, found.engine.max_num_seqs) == (8222, 3, 128)
    assert Path(found.engine.model).is_absolute()


def test_of_several_groups_the_one_that_was_tuned_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(
        "engine: {kind: sim}\nengines:\n  a: {max_num_seqs: 64}\n  b: {frozen: true, served_model_name: judge}\n"
    )
    groups = load(written(tmp_path, file, group="a"), environ={}).engines
    assert (groups["a"].max_num_seqs, groups["b"].max_num_seqs) == (128, 256)
