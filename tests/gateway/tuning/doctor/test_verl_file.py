"""A verl configuration: what is given, by whom, and what verl makes of the rest."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.tuning.doctor.files.verl import read_verl
from gateway.tuning.doctor.known_keys import ROLLOUT


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
        "BATCH=64\npython3 -m verl.trainer.main_ppo --config-name=x \\\n"
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


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    path = script(tmp_path, "python -m verl.trainer.main_ppo data.seed=1 data.seed=2")
    assert read_verl(path).values.at("data.seed").value == 2


def test_overrides_in_an_array_count(tmp_path: Path) -> None:
    text = 'DATA=(\n  data.train_batch_size=7 # why\n)\npython -m verl.trainer.main_ppo "${DATA[@]}" data.seed=1\n'
    file = read_verl(script(tmp_path, text))
    assert file.values.at("data.train_batch_size").value == 7
    assert not any(one.is_lost for one in file.overrides)


def test_overrides_behind_a_comment_are_lost_and_do_not_count(tmp_path: Path) -> None:
    lost = " data.max_prompt_length=7 \\\n data.shuffle=False\n"
    file = read_verl(script(tmp_path, f"python -m verl.trainer.main_ppo data.seed=1 \\\n # lengths\n{lost}"))
    assert [one.key for one in file.overrides if one.is_lost] == ["data.max_prompt_length", "data.shuffle"]
    assert file.values.at("data.max_prompt_length").value == 512


def test_a_comment_right_behind_the_command_loses_all_of_them(tmp_path: Path) -> None:
    text = "python -m verl.trainer.main_ppo \\\n # data\n data.seed=1 \\\n data.shuffle=False\n"
    assert [one.is_lost for one in read_verl(script(tmp_path, text)).overrides] == [True, True]


def test_overrides_without_a_command_are_a_list_of_them(tmp_path: Path) -> None:
    file = read_verl(script(tmp_path, "data.seed=1\ndata.shuffle=False\n"))
    assert [one.is_lost for one in file.overrides] == [False, False]


def test_a_default_that_follows_another_key_has_that_ones_origin(tmp_path: Path) -> None:
    path = document(
        tmp_path, "data:\n  max_prompt_length: 77\nactor_rollout_ref:\n  actor:\n    use_dynamic_bsz: true\n"
    )
    values = read_verl(path).values
    prompt = values.at("actor_rollout_ref.rollout.prompt_length")
    assert (prompt.value, prompt.place) == (77, f"{path}:2")
    assert values.is_true("critic.use_dynamic_bsz")
    assert values.number("critic.forward_max_token_len_per_gpu") == 32768
    assert values.at("actor_rollout_ref.ref.strategy").value == "fsdp"
    assert values.at("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu").value == 16384


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


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.sh: cannot be read: No such file"):
        read_verl(tmp_path / "none.sh")


@pytest.mark.parametrize(
    ("trainer", "known"),
    [
        ("verl.trainer.main_ppo", set()),
        ("verl.experimental.one_step_off_policy.main_ppo", {"rollout.nnodes"}),
        (
            "verl.trainer.main_ppo --config-name fully_async_ppo_trainer",
            {"rollout.nnodes", "async_training.partial_rollout"},
        ),
    ],
)
def test_keys_of_a_trainer_of_its_own_are_known_where_it_is_called(
    tmp_path: Path, trainer: str, known: set[str]
) -> None:
    own = {"rollout.nnodes": 2, "async_training.partial_rollout": True}
    text = " ".join([f"python -m {trainer}", *(f"{key}={value}" for key, value in own.items())])
    keys = read_verl(script(tmp_path, text)).keys
    assert {key for key in own if keys.knows(key)} == known
    assert keys.nearest("rollout.nnodes").endswith("rollout.nnodes")


def test_all_keys_of_a_standalone_rollout_server_are_known(tmp_path: Path) -> None:
    rollout = (
        "actor_rollout_ref: {rollout: {nnodes: 1, n_gpus_per_node: 4}}\nrollout: {nnodes: 1, n_gpus_per_node: 4}\n"
    )
    for text in (rollout, "nnodes: 1\nn_gpus_per_node: 4\n"):
        file = read_verl(document(tmp_path, text))
        asked = [setting.key if file.has_trainer else ROLLOUT + setting.key for setting in file.values]
        assert len(asked) >= 2
        assert [key for key in asked if not file.keys.knows(key)] == []
