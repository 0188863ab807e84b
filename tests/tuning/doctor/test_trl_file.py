"""A TRL configuration, in data or in a call that is read and never run."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from tuning.doctor.files.trl import read_trl
from tuning.doctor.finding import Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_call_of_literals_is_read_with_its_lines_and_not_run(tmp_path: Path) -> None:
    text = (
        "raise SystemExit\nargs = trl.GRPOConfig(\n\n  num_generations=8, beta=1 / N, generation_kwargs={'seed': 1})\n"
    )
    path = write(tmp_path, "train.py", text)
    file = read_trl(path)
    group = file.values.at("num_generations")
    assert (group.value, group.place) == (8, f"{path}:4")
    assert file.values.at("generation_kwargs").value == {"seed": 1}
    assert file.values.at("beta").value is None
    assert file.unread == (f"{path}:4: beta=1 / N: a run alone has its value",)


def test_without_all_fields_no_default_is_believed(tmp_path: Path) -> None:
    file = read_trl(write(tmp_path, "train.py", "GRPOConfig(beta=0.1, **fields())\n"))
    assert file.values.at("use_vllm").value is None
    assert file.values.number("beta") == 0.1
    assert "**=fields(): a run alone has its value" in file.unread[0]


def test_a_program_without_a_field_of_grpo_is_another_trainers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.sh:1: sft\.py has no field of GRPOConfig"):
        read_trl(write(tmp_path, "run.sh", "nohup accelerate launch --num_processes 2 sft.py --learning_rate 1e-6\n"))


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
        ("sft.yaml", "learning_rate: 0.1\nmodel_name_or_path: m\n", "none of its keys is a field of GRPOConfig alone"),
        ("t.txt", "", "must end in"),
        ("t.yaml", "compute_environment: LOCAL_MACHINE\nbf16: true\n", "none of its keys"),
        ("t.sh", "echo a", "no `accelerate launch`"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{says}"):
        read_trl(write(tmp_path, name, text))


def test_processes_are_those_of_accelerates_file_and_unknown_without_it(tmp_path: Path) -> None:
    launch = "accelerate launch --config_file zero3.yaml train.py --num_generations 32 --lora_target_modules q_proj\n"
    path = write(tmp_path, "run.sh", launch)
    assert read_trl(path).processes is None
    found = examine(subject_of(trl=path))
    assert [one.severity for one in found if one.rule == "trl-prompt-batch"] == [Severity.CONSIDER]
    assert not [one for one in found if one.rule == "trl-fields"]
    write(tmp_path, "zero3.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n")
    assert read_trl(path).processes == 8
    assert not [one for one in examine(subject_of(trl=path)) if one.rule == "trl-prompt-batch"]


def test_the_command_line_is_over_the_file_of_config(tmp_path: Path) -> None:
    write(tmp_path, "grpo.yaml", "num_generations: 4\nuse_vllm: true\n")
    file = read_trl(write(tmp_path, "run.sh", "trl grpo --config grpo.yaml --num_generations 16\n"))
    assert (file.values.whole("num_generations"), file.values.is_true("use_vllm")) == (16, True)
    file = read_trl(write(tmp_path, "run.sh", "trl grpo --config elsewhere.yaml --num_generations 16\n"))
    assert "--config elsewhere.yaml is not found from here" in file.unread[0]
    assert file.values.at("use_vllm").value is None


def test_a_parsers_program_asks_for_its_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the script that launches it"):
        read_trl(write(tmp_path, "train.py", "args = TrlParser(GRPOConfig).parse_args_and_config()\n"))
