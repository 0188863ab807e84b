"""A TRL configuration, in data or in a call that is read and never run."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.tuning.doctor.files.trl import read_trl

CALL = """
import os
raise SystemExit("this file was run")
BATCH = 4
args = trl.GRPOConfig(
    per_device_train_batch_size=2 * BATCH,
    num_generations=8,
    learning_rate=1e-6,
    generation_kwargs={"seed": 1},
    **more,
)
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_call_is_read_with_its_lines_and_not_run(tmp_path: Path) -> None:
    path = write(tmp_path, "train.py", CALL)
    file = read_trl(path)
    group = file.values.at("num_generations")
    assert (group.value, group.place) == (8, f"{path}:7")
    assert file.values.at("generation_kwargs").value == {"seed": 1}
    assert file.values.number("learning_rate") == 1e-6


def test_named_constants_are_computed_and_what_only_a_run_has_is_listed(tmp_path: Path) -> None:
    file = read_trl(write(tmp_path, "train.py", CALL))
    assert file.values.whole("per_device_train_batch_size") == 8
    assert [text.partition(": ")[2] for text in file.unread] == ["**more: a run alone has its fields"]


def test_a_name_that_is_assigned_twice_is_not_known(tmp_path: Path) -> None:
    file = read_trl(write(tmp_path, "train.py", "N = 1\nN = 2\nGRPOConfig(num_generations=N)\n"))
    assert file.values.at("num_generations").value is None
    assert "num_generations=N: a run alone has its value" in file.unread[0]


@pytest.mark.parametrize(("name", "text"), [("t.yaml", "num_generations: 4\n"), ("t.json", '{"num_generations": 4}')])
def test_data_files_give_fields_and_the_rest_is_default(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, name, text)
    values = read_trl(path).values
    assert (values.at("num_generations").value, values.at("num_generations").place) == (4, f"{path}:1")
    assert values.at("max_completion_length").value == 512
    assert values.at("max_completion_length").origin == "default"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.py", "x = 1", "there is none"),
        ("t.py", "GRPOConfig()\nGRPOConfig()\n", "there is line 1, line 2"),
        ("t.py", "def (", "not Python"),
        ("t.yaml", "colour: red", "none of its keys"),
        ("t.txt", "", "must end in"),
        ("t.yaml", "compute_environment: LOCAL_MACHINE\nbf16: true\n", "a configuration of accelerate"),
        ("t.sh", "echo a", "no `accelerate launch`"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{says}"):
        read_trl(write(tmp_path, name, text))
