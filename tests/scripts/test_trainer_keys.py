"""The tables of keys: verl's are those that its own Hydra composes, TRL's those of the installed class."""

import ast
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from tuning.doctor import known_keys
from tuning.doctor.known_keys import VERL, trainer_names, trl_defaults, verl_keys

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl" / "bin" / "python"
PACKAGES = ROOT / ".venv-verl" / "lib" / "python3.11" / "site-packages"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs make setup-verl")
def test_the_newest_table_is_that_of_the_installed_verl() -> None:
    release = VERL.removeprefix("verl ")
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


def test_no_key_is_suggested_that_does_not_exist() -> None:
    """Each key without its last letter, and each with a wrong section."""
    keys = verl_keys()
    asked = {key[:-1] for key in keys.defaults} | {f"critic.{key}" for key in keys.defaults}
    found = {key: (keys.nearest(key), keys.renamed(key)) for key in sorted(asked)[::7] if not keys.has(key)}
    assert [(key, near) for key, nearest in found.items() for near in nearest if near and not keys.has(near)] == []


def test_the_trainers_of_megatron_and_of_sft_have_their_keys() -> None:
    assert any(name.startswith("sft_trainer") for name in trainer_names())
    assert verl_keys("ppo_megatron_trainer").defaults["actor_rollout_ref.actor.strategy"] == "megatron"
