"""A verl configuration: what is given, by whom, and what verl makes of the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from tuning.doctor.files.verl import read_verl
from tuning.doctor.known_keys import verl_keys
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of


def script(folder: Path, text: str) -> Path:
    path = folder / "train.sh"
    path.write_text(text, encoding="utf-8")
    return path


def document(folder: Path, text: str, name: str = "train.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_have_values_of_hydra_and_their_lines(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "BATCH=64\npython3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\\n"
        "  data.train_batch_size=$((BATCH * 2)) \\\n"
        '  actor_rollout_ref.actor.optim.lr=1e-6 trainer.logger=\'["console","wandb"]\' \\\n'
        "  ++actor_rollout_ref.rollout.enforce_eager=True critic.enable=null $@\n",
    )
    values = read_verl(path).values
    batch = values.at("data.train_batch_size")
    assert (batch.value, batch.origin, batch.place) == (128, "cli", f"{path}:3")
    assert values.number("actor_rollout_ref.actor.optim.lr") == 1e-6
    assert values.at("trainer.logger").value == ["console", "wandb"]
    assert values.is_true("actor_rollout_ref.rollout.enforce_eager")
    assert values.at("critic.enable").value is None


def test_overrides_behind_a_comment_are_lost_and_do_not_count(tmp_path: Path) -> None:
    lost = " data.max_prompt_length=7 \\\n data.shuffle=False\n"
    file = read_verl(script(tmp_path, f"python -m verl.trainer.main_ppo data.seed=1 \\\n # lengths\n{lost}"))
    assert [one.key for one in file.overrides if one.is_lost] == ["data.max_prompt_length", "data.shuffle"]
    assert file.values.at("data.max_prompt_length").value == 512


def test_fields_of_rollout_config_alone_have_that_classes_defaults(tmp_path: Path) -> None:
    file = read_verl(document(tmp_path, "name: vllm\nprompt_length: 9\n"))
    assert not file.has_trainer
    assert file.values.at("actor_rollout_ref.rollout.max_num_seqs").value == 1024
    assert file.values.at("actor_rollout_ref.rollout.prompt_length").key == "prompt_length"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.sh", "echo nothing here\n", "no override of verl"),
        ("a.yaml", "colour: red\n", "none of colour is a key"),
        ("a.yaml", "{", "not YAML"),
        ("a.yaml", "data: {seed: 1}\ndata: {seed: 2}\n", "already given on line 1"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_file(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*{says}"):
        read_verl(document(tmp_path, text, name))


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("verl.trainer.main_ppo", {"rollout.nnodes", "async_training.partial_rollout"}),
        ("verl.experimental.one_step_off_policy.main_ppo", {"async_training.partial_rollout"}),
        ("verl.trainer.main_ppo --config-name fully_async_ppo_trainer", set()),
        ("verl.experimental.fully_async_policy.fully_async_main --config-name='fully_async_ppo_trainer.yaml'", set()),
    ],
)
def test_keys_are_those_of_the_trainer_that_is_called(tmp_path: Path, command: str, refused: set[str]) -> None:
    own = {"rollout.nnodes": 2, "async_training.partial_rollout": True}
    text = " ".join([f"python -m {command}", *(f"{key}={value}" for key, value in own.items())])
    keys = read_verl(script(tmp_path, text)).keys
    assert {key for key in own if not keys.has(key)} == refused


@pytest.mark.parametrize(
    ("command", "trainer"),
    [
        ("verl.trainer.main_ppo actor_rollout_ref.rollout.n=2", "ppo_trainer"),
        ("verl.trainer.main_ppo model_engine=megatron data.seed=1", "ppo_trainer model_engine=megatron"),
        ("verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.seed=1", "ppo_megatron_trainer"),
    ],
)
def test_the_trainer_is_known_by_the_command(tmp_path: Path, command: str, trainer: str) -> None:
    assert read_verl(script(tmp_path, f"torchrun -m {command}")).keys.trainer == trainer


@pytest.mark.parametrize("module", ["verl.trainer.sft_trainer", "verl.trainer.main_generation_server"])
def test_what_does_not_train_by_rollouts_is_refused(tmp_path: Path, module: str) -> None:
    with pytest.raises(ConfigError, match=f"{module} does not train by rollouts"):
        read_verl(script(tmp_path, f"torchrun -m {module} data.seed=1"))


def test_a_trainer_unknown_to_verl_is_read_with_the_bases_defaults_and_listed(tmp_path: Path) -> None:
    file = read_verl(script(tmp_path, "python -m recipe.mine.main actor_rollout_ref.rollout.n=2 data.mine=1"))
    assert not file.keys.is_complete
    assert file.values.at("data.train_batch_size").value == 1024
    assert any("has no trainer recipe.mine.main: its keys are not judged" in text for text in file.unread)


def test_values_that_a_run_alone_has_are_listed(tmp_path: Path) -> None:
    command = "python -m verl.trainer.main_ppo data.seed=$N trainer.nnodes=$1 $@"
    text = f"N=$(nproc)\nif [ $# -lt 1 ]; then exit 1; fi\n{command}\n"
    file = read_verl(script(tmp_path, text))
    assert [text.split(": ")[1] for text in file.unread] == ["data.seed=$(nproc)", "trainer.nnodes="]


def test_of_several_trainers_the_first_is_read_and_the_others_are_listed(tmp_path: Path) -> None:
    text = "for seed in 1 2; do\n  python -m verl.trainer.main_ppo data.seed=$seed\ndone\n"
    file = read_verl(script(tmp_path, text))
    assert file.values.at("data.seed").value == 1
    assert file.unread == (f"{tmp_path}/train.sh: 2 trainers are started, and the first is read",)


def test_a_composed_configuration_is_read_whole_with_no_key_refused(tmp_path: Path) -> None:
    """That is what `--cfg job` prints, and what Hydra saves beside a run."""
    tree: dict[str, Any] = {}
    for key, value in verl_keys().defaults.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    tree["data"]["train_batch_size"] = 96
    path = document(tmp_path, json.dumps(tree))  # YAML too, and read as such
    assert (read_verl(path).values.whole("data.train_batch_size"), read_verl(path).has_trainer) == (96, True)
    assert not [one for one in examine(subject_of(verl=path)) if one.rule == "verl-keys"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "defaults: [base, _self_]\ndata: {seed: 5}\n"),
        ("train.sh", "python -m verl.trainer.main_ppo --config-path=config --config-name=mine data.seed=6\n"),
    ],
)
def test_what_hydra_alone_composes_is_refused_with_what_to_give(tmp_path: Path, name: str, text: str) -> None:
    """No value of a base that is not read counts as not given."""
    with pytest.raises(ConfigError, match="give the YAML that `--cfg job` prints, or that a run saved"):
        read_verl(document(tmp_path, text, name))
