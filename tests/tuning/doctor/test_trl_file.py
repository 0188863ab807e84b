"""A TRL configuration, in data or in a call that is read and never run."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from tuning.doctor.files.trl import read_trl
from tuning.doctor.finding import Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

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
        ("sft.yaml", "learning_rate: 0.1\nmodel_name_or_path: m\n", "none of its keys is a field of GRPOConfig alone"),
        ("t.txt", "", "must end in"),
        ("t.yaml", "compute_environment: LOCAL_MACHINE\nbf16: true\n", "a configuration of accelerate"),
        ("t.sh", "echo a", "no `accelerate launch`"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{says}"):
        read_trl(write(tmp_path, name, text))


def test_fields_that_a_dictionary_gets_later_are_not_known_and_not_default(tmp_path: Path) -> None:
    text = "more: dict = dict(beta=0.1)\nif x:\n    more['use_vllm'] = True\nGRPOConfig(**more)\n"
    file = read_trl(write(tmp_path, "train.py", text))
    assert file.values.number("beta") == 0.1
    assert file.values.at("use_vllm").value is None
    assert "use_vllm=True: a run alone has its value" in file.unread[0]


def test_without_all_fields_no_default_is_believed(tmp_path: Path) -> None:
    file = read_trl(write(tmp_path, "train.py", "GRPOConfig(beta=0.1, **fields())\n"))
    assert file.values.at("use_vllm").value is None
    assert file.values.number("beta") == 0.1


def test_a_constant_that_fails_to_be_computed_is_listed(tmp_path: Path) -> None:
    file = read_trl(write(tmp_path, "train.py", "GRPOConfig(beta=1 // 0, run_name=None, seed=len(x))\n"))
    assert [line.partition(": ")[2] for line in file.unread] == [
        "beta=1 // 0: a run alone has its value",
        "seed=len(x): a run alone has its value",
    ]


def test_processes_are_those_of_accelerates_file_and_unknown_without_it(tmp_path: Path) -> None:
    launch = "accelerate launch --config_file zero3.yaml train.py --num_generations 32 --lora_target_modules q_proj\n"
    path = write(tmp_path, "run.sh", launch)
    assert read_trl(path).processes is None
    found = examine(subject_of(trl=path))
    assert [one.severity for one in found if one.rule == "trl-prompt-batch"] == [Severity.CONSIDER]
    assert not [one for one in found if one.rule == "trl-fields"]
    write(tmp_path, "zero3.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n")
    assert read_trl(path).processes == 8
    assert [one.severity for one in examine(subject_of(trl=path)) if one.rule == "trl-prompt-batch"] == [Severity.FINE]


@pytest.mark.parametrize(
    "command",
    ["accelerate launch {}", "accelerate launch --num_processes 2 {} --use_vllm", "python {} --num_generations 4"],
)
def test_another_trainer_is_refused_with_its_program(tmp_path: Path, command: str) -> None:
    write(tmp_path, "sft.py", "from trl import SFTConfig, SFTTrainer\n")
    with pytest.raises(ConfigError, match=r"run\.sh:1: sft\.py is another trainer"):
        read_trl(write(tmp_path, "run.sh", f"{command.format('sft.py')}\n"))


def test_a_program_that_is_not_found_may_be_any_trainer(tmp_path: Path) -> None:
    path = write(tmp_path, "run.sh", "accelerate launch train.py --learning_rate 1e-6\n")
    found = examine(subject_of(trl=path))
    assert [one.rule for one in found if one.severity is not Severity.FINE] == ["trl-unread"]
    assert "train.py is not found from here, and may be any trainer" in found[0].message


def test_a_program_that_calls_the_configuration_is_read_for_its_launcher(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "args = GRPOConfig(num_generations=4, use_vllm=True)\n")
    file = read_trl(write(tmp_path, "run.sh", "torchrun --nproc_per_node=4 train.py --num-generations 2\n"))
    assert (file.values.whole("num_generations"), file.processes, file.is_call) == (4, 4, True)


def test_the_command_line_is_over_the_file_of_config(tmp_path: Path) -> None:
    write(tmp_path, "grpo.yaml", "num_generations: 4\nuse_vllm: true\n")
    file = read_trl(write(tmp_path, "run.sh", "trl grpo --config grpo.yaml --num_generations 16\n"))
    assert (file.values.whole("num_generations"), file.values.is_true("use_vllm")) == (16, True)
    file = read_trl(write(tmp_path, "run.sh", "trl grpo --config elsewhere.yaml --num_generations 16\n"))
    assert "--config elsewhere.yaml is not found from here" in file.unread[0]
    assert file.values.at("use_vllm").value is None


def test_a_second_trainer_is_listed(tmp_path: Path) -> None:
    command = "trl grpo --num_generations 4\n"
    file = read_trl(write(tmp_path, "run.sh", f"{command}{command}"))
    assert [text.rpartition("run.sh:")[2] for text in file.unread] == [
        "2: one more trainer: give it in a script of its own"
    ]


@pytest.mark.parametrize(
    ("program", "value", "is_listed"),
    [
        ("args.use_vllm = True", True, False),
        ("def main():\n    args.use_vllm = True", True, False),
        ("if __name__ == '__main__':\n    args.use_vllm = True", True, False),
        ("if other:\n    args.use_vllm = True", None, True),
        ("args.use_vllm = True\nargs.use_vllm = False", None, True),
        ("args.use_vllm = ask()", None, True),
        ("other.use_vllm = True", False, False),
    ],
)
@pytest.mark.parametrize(
    "made", ["args = GRPOConfig(beta=0)", "_, args = TrlParser(GRPOConfig).parse_args_and_config()"]
)
def test_fields_that_the_program_sets_later_count(
    tmp_path: Path, made: str, program: str, value: object, is_listed: bool
) -> None:
    write(tmp_path, "train.py", f"{made}\n{program}\n")
    file = read_trl(write(tmp_path, "run.sh", "python train.py --beta 0\n"))
    assert file.values.at("use_vllm").value is value
    assert any("use_vllm=" in text for text in file.unread) == is_listed


def test_a_parsers_program_asks_for_its_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the script that launches it"):
        read_trl(write(tmp_path, "train.py", "args = TrlParser(GRPOConfig).parse_args_and_config()\n"))


def test_values_that_no_rule_reads_need_no_look(tmp_path: Path) -> None:
    path = write(tmp_path, "train.py", "GRPOConfig(run_name=a.name, use_vllm=True)\n")
    found = [one for one in examine(subject_of(trl=path)) if one.rule == "trl-unread"]
    assert [one.severity for one in found] == [Severity.FINE]
