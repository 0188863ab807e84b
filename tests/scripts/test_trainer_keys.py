"""The tables of keys: how they are read from verl, and that TRL's is the installed one's."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from gateway.tuning.doctor import known_keys
from gateway.tuning.doctor.known_keys import trl_defaults, verl_keys
from scripts.trainer_keys import verl_keys as read_verl_keys

VERL = Path(__file__).parents[2] / ".venv-verl/lib/python3.11/site-packages/verl"

_ROLLOUT = """
class RolloutConfig:
    _mutable_fields = {"n"}
    n: int = 1
    max_num_seqs: int = 1024
    custom: dict = field(default_factory=dict)
"""


def test_keys_of_the_first_trainer_count_and_the_class_adds_what_no_yaml_has(tmp_path: Path) -> None:
    configs = tmp_path / "trainer" / "config"
    configs.mkdir(parents=True)
    (tmp_path / "workers" / "config").mkdir(parents=True)
    (tmp_path / "workers" / "config" / "rollout.py").write_text(_ROLLOUT, encoding="utf-8")
    rollout = "actor_rollout_ref: {rollout: {n: 1, max_num_seqs: 256}}\n"
    for name in ("", "_megatron", "_veomni", "_torchtitan"):
        own = "actor: {strategy: fsdp}\n" if not name else f"actor: {{strategy: other, a{name}: {{}}}}\n"
        (configs / f"_generated_ppo{name}_trainer.yaml").write_text(rollout + own, encoding="utf-8")
    found = read_verl_keys(tmp_path)
    assert found["keys"] == {
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.max_num_seqs": 256,
        "actor.strategy": "fsdp",
        "actor.a_megatron": {},
        "actor.a_veomni": {},
        "actor.a_torchtitan": {},
    }
    assert found["added"] == ["actor_rollout_ref.rollout.custom"]
    assert found["rollout_config"] == {"n": 1, "max_num_seqs": 1024, "custom": None}


def test_keys_that_only_another_trainer_has_are_told_apart(tmp_path: Path) -> None:
    configs, own = tmp_path / "trainer" / "config", tmp_path / "experimental" / "fully_async_policy" / "config"
    for folder in (configs, own, tmp_path / "workers" / "config"):
        folder.mkdir(parents=True)
    (tmp_path / "workers" / "config" / "rollout.py").write_text(_ROLLOUT, encoding="utf-8")
    for name in ("", "_megatron", "_veomni", "_torchtitan"):
        (configs / f"_generated_ppo{name}_trainer.yaml").write_text("data: {seed: 1}\n", encoding="utf-8")
    text = "hydra: {searchpath: []}\ndefaults: [ppo_trainer]\ndata: {seed: 2}\nrollout: {nnodes: 1}\n"
    (own / "fully_async_ppo_trainer.yaml").write_text(text, encoding="utf-8")
    (own / "fully_async_ppo_megatron_trainer.yaml").write_text("rollout: {nnodes: 2, n: 4}\n", encoding="utf-8")
    assert read_verl_keys(tmp_path)["of_trainers"] == {
        "fully_async": {"rollout.nnodes": 1, "rollout.n": 4},
        "one_step_off": {},
    }


@pytest.mark.skipif(not VERL.exists(), reason="needs make setup-verl")
def test_the_table_is_that_of_the_installed_verl() -> None:
    table = json.loads((Path(known_keys.__file__).parent / "known" / "verl-0.9.1.json").read_text(encoding="utf-8"))
    assert read_verl_keys(VERL) == table, "python -m scripts.trainer_keys verl"


def test_the_table_has_every_field_of_the_installed_grpo_config() -> None:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "trainer" / "grpo_config.py").read_text(encoding="utf-8")
    fields = [
        field.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    assert len(fields) > 50
    assert [name for name in fields if name not in trl_defaults()] == [], "python -m scripts.trainer_keys trl"


def test_unknown_keys_of_verl_find_their_neighbours() -> None:
    keys = verl_keys()
    assert not keys.knows("actor_rollout_ref.rollout.tensor_parallel_size")
    assert keys.nearest("actor_rollout_ref.rollout.tensor_parallel_size").endswith(".tensor_model_parallel_size")
    assert keys.nearest("actor_rollout_ref.actor.ppo_minibatch_size") == "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert keys.nearest("critic.model.fsdp_config.param_offload") == "critic.fsdp.param_offload"
    assert keys.nearest("actor_rollout_ref.rollout.update_weights_bucket_megabytes").endswith(
        "checkpoint_engine.update_weights_bucket_megabytes"
    )
    assert keys.nearest("colour.of.money") == ""


def test_what_stands_below_a_free_section_is_known() -> None:
    keys = verl_keys()
    assert keys.knows("actor_rollout_ref.rollout.engine_kwargs.vllm.any_argument")
    assert keys.knows("actor_rollout_ref.model.override_config.attn_implementation")
    assert keys.knows("actor_rollout_ref.rollout.val_kwargs.temperature")
    assert not keys.knows("data.max_prompt_len")


def test_what_keys_are_said_to_be_instead_exists() -> None:
    from gateway.tuning.doctor.known_keys import _RENAMED

    keys = verl_keys()
    assert [new for new in _RENAMED.values() if not keys.knows(new)] == []
    assert [old for old in _RENAMED if keys.knows(old)] == []
