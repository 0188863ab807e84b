"""Prints a trainer's configuration keys with their defaults, for the doctor: the keys of verl's configuration, or the
fields of TRL's GRPOConfig.

    python -m scripts.trainer_keys verl FOLDER_OF_THE_PACKAGE > gateway/tuning/doctor/known/verl-0.9.1.json
    python -m scripts.trainer_keys trl > gateway/tuning/doctor/known/trl-1.16.0.json

verl is not imported: its composed YAML files and the dataclasses in its source are read.
"""

import ast
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

# The default trainer first: its default counts for a shared key.
_COMPOSED = (
    "_generated_ppo_trainer.yaml",
    "_generated_ppo_megatron_trainer.yaml",
    "_generated_ppo_veomni_trainer.yaml",
    "_generated_ppo_torchtitan_trainer.yaml",
)
_HYDRAS = ("hydra", "defaults")
# Trainers of their own, which add keys to the default trainer's: the folder of each, and what its commands are called
# with (a module, or --config-name).
_OTHERS = {"fully_async_policy": "fully_async", "one_step_off_policy": "one_step_off"}
# A dataclass with fields that the composed files leave out, which Hydra takes with a leading plus; and people build it
# by themselves, with defaults of its own.
_SECTION, _FILE, _CLASS = "actor_rollout_ref.rollout", "workers/config/rollout.py", "RolloutConfig"


def verl_keys(package: Path) -> dict[str, Any]:
    """`keys` by dotted name with their defaults; `of_trainers`, those that only other trainers have, by what these are
    called; `added`, names that Hydra wants a plus for; `rollout_config`, the defaults of that class."""
    keys: dict[str, Any] = {}
    for name in _COMPOSED:
        tree = yaml.safe_load((package / "trainer" / "config" / name).read_text(encoding="utf-8"))
        for key, value in _leaves(tree):
            keys.setdefault(key, value)
    rollout = dict(_fields(package / _FILE, _CLASS))
    names = (f"{_SECTION}.{field}" for field in rollout)
    added = [name for name in names if not any(key == name or key.startswith(f"{name}.") for key in keys)]
    of_trainers = {
        name: _own_keys(package / "experimental" / folder / "config", keys) for folder, name in _OTHERS.items()
    }
    return {"keys": keys, "of_trainers": of_trainers, "added": added, "rollout_config": rollout}


def _own_keys(folder: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the YAML files of a folder add to `keys`."""
    own: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml"), key=lambda path: "megatron" in path.name):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key, value in _leaves({name: value for name, value in tree.items() if name not in _HYDRAS}):
            if key not in keys:
                own.setdefault(key, value)
    return own


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _fields(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Return the plain fields of a dataclass in a source file; a default that is not a literal is null."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                try:
                    yield field.target.id, ast.literal_eval(field.value) if field.value else None
                except ValueError:
                    yield field.target.id, None


def trl_fields() -> dict[str, Any]:
    """Return the fields of the installed GRPOConfig; a default that JSON cannot hold is null."""
    from trl import GRPOConfig

    return {field.name: _default(field) for field in dataclasses.fields(GRPOConfig)}


def _default(field: "dataclasses.Field[Any]") -> Any:
    value = getattr(field.default, "value", field.default)  # an enum's value
    return value if isinstance(value, (bool, int, float, str)) else None


if __name__ == "__main__":
    found = verl_keys(Path(sys.argv[2])) if sys.argv[1] == "verl" else trl_fields()
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
