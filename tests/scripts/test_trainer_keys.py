"""The tables of keys: verl's are those that its own Hydra composes, TRL's those of the installed class."""

import ast
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.tuning.doctor import known_keys
from gateway.tuning.doctor.files.hydra_override import parsed_override
from gateway.tuning.doctor.known_keys import (
    BASE,
    Composition,
    VerlKeys,
    release_of,
    trainer_names,
    trl_defaults,
    verl_keys,
    verl_releases,
)

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
PACKAGES = ROOT / ".venv-verl" / "lib" / "python3.11" / "site-packages"
R = "actor_rollout_ref.rollout."


@pytest.mark.skipif(not PYTHON.exists(), reason="needs make setup-verl")
def test_the_newest_table_is_that_of_the_installed_verl() -> None:
    release = verl_releases()[-1]
    command = [str(PYTHON), "scripts/trainer_keys.py", "verl", release, str(PACKAGES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT)
    table = Path(known_keys.__file__).parent / "known" / f"verl-{release}.json"
    assert json.loads(done.stdout) == json.loads(table.read_text(encoding="utf-8")), "scripts/trainer_keys.py verl"


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
    assert [name for name in fields if name not in trl_defaults()] == [], "python scripts/trainer_keys.py trl"


def test_a_misspelt_key_finds_its_neighbour() -> None:
    keys = verl_keys()
    assert keys.nearest(R + "tensor_parallel_size") == R + "tensor_model_parallel_size"
    assert keys.nearest("actor_rollout_ref.actor.ppo_minibatch_size") == "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert keys.nearest("critic.model.fsdp_config.param_offload") == "critic.fsdp.param_offload"
    assert keys.nearest("colour.of.money") == ""


@pytest.mark.parametrize("version", verl_releases())
def test_no_key_is_suggested_that_does_not_exist(version: str) -> None:
    """Each key without its last letter, each with a wrong section, and keys that other releases have."""
    keys = verl_keys(BASE, version)
    others = [key for other in verl_releases() for key in verl_keys(BASE, other).defaults]
    asked = {key[:-1] for key in keys.defaults} | {f"critic.{key}" for key in keys.defaults} | set(others)
    asked.add("critic.fsdp_config.grad_offload")
    found = {key: keys.nearest(key) for key in sorted(asked)[::7] if not keys.has(key)}
    assert [(key, near) for key, near in found.items() if near and not keys.has(near)] == []
    assert keys.nearest("critic.fsdp_config.grad_offload") != "critic.fsdp.grad_offload"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["a.x=2"], []),
        (["a.y=2"], ["a.y=2"]),
        (["+a.y=2", "a.y=3"], []),
        (["+a.x=2"], ["+a.x=2"]),
        (["+a.none=2"], []),
        (["+free.any.key=2"], []),
        (["free.any=2"], ["free.any=2"]),
        (["++free.any=2", "++a.x=3"], []),
        (["+a.list=[2]"], []),
        (["~a.x"], []),
        (["~a.none"], ["~a.none"]),
        (["~b"], ["~b"]),
        (["none.sub=1"], ["none.sub=1"]),
    ],
)
def test_overrides_are_refused_where_hydra_refuses_them(words: list[str], refused: list[str]) -> None:
    defaults: dict[str, Any] = {"a.x": 1, "a.none": None, "a.list": [1], "free": {}, "none": None}
    composition = Composition(VerlKeys("0", "t", defaults))
    parsed = [(word, parsed_override(word)) for word in words]
    assert [word for word, one in parsed if one and composition.refusal(one)] == refused


def test_releases_are_ordered_and_a_version_takes_the_newest_that_is_not_newer() -> None:
    assert verl_releases() == ("0.4.1", "0.5.0", "0.6.1", "0.7.0", "0.8.0", "0.9.1")
    asked = ("", "0.7", "0.6.9", "v0.7.0.post1", "0.1", "2.0")
    assert [release_of(version) for version in asked] == ["0.9.1", "0.7.0", "0.6.1", "0.7.0", "0.4.1", "0.9.1"]


def test_each_release_has_the_trainers_of_megatron_and_of_sft() -> None:
    for version in verl_releases():
        names = trainer_names(version)
        assert "ppo_megatron_trainer" in names
        assert any(name.startswith("sft_trainer") for name in names)
        assert verl_keys("ppo_megatron_trainer", version).defaults["actor_rollout_ref.actor.strategy"] == "megatron"


def test_new_names_of_keys_exist_in_some_release_and_their_old_names_do_not() -> None:
    from gateway.tuning.doctor.known_keys import _RENAMED

    keys = verl_keys()
    assert [new for new in _RENAMED.values() if not keys.has(new)] == []
