"""Prints the keys of a trainer with their defaults, for the doctor to read: those that Hydra composes of verl's own
configuration, or the fields of TRL's GRPOConfig.

    python scripts/trainer_keys.py verl 0.9.1 FOLDER > tuning/doctor/known/verl-0.9.1.json
    python scripts/trainer_keys.py trl > tuning/doctor/known/trl-1.16.0.json

FOLDER holds the package `verl`, and `recipe` beside it where a release has recipes. Hydra composes its
YAML files, and the decorators and dataclasses in its source are read. Run it with an interpreter that has Hydra, such
as verl's own.
"""

import ast
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BASE = "ppo_trainer"
# Choices between groups of keys that change which keys there are, by the configuration that has them.
_CHOICES = {
    "ppo_trainer": [f"model_engine={name}" for name in ("megatron", "veomni", "torchtitan")],
    "sft_trainer_engine": [f"engine={name} optim={name}" for name in ("megatron", "veomni", "torchtitan", "automodel")],
}
_WITHOUT_TRAINER = ("generation", "evaluation")
_MAIN = re.compile(r"@hydra\.main\(([^)]*)\)")
_NAME = re.compile(r"config_name=[\"']([\w.-]+)[\"']")
# A dataclass that people build by themselves, with defaults of its own.
_CLASS_FILE, _CLASS = "workers/config/rollout.py", "RolloutConfig"


def verl_table(release: str, folder: Path) -> dict[str, Any]:
    """`trainers`: keys with their defaults by name of a configuration, with its choices of groups; all but the base as
    what they add to and lack of it. `modules`: the configuration that a module takes of its own accord.
    `rollout_config`: the defaults of that class, where the release has it."""
    trainers = dict(_trainers(folder))
    base = trainers[_BASE]
    others = {name: _beside(base, keys) for name, keys in trainers.items() if name != _BASE}
    path = folder / "verl" / _CLASS_FILE
    return {
        "release": release,
        "base": base,
        "others": others,
        "modules": dict(_modules(folder, trainers)),
        "rollout_config": dict(_fields(path, _CLASS)) if path.exists() else {},
    }


def _trainers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted({*folder.glob("verl/**/config/*.yaml"), *folder.glob("recipe/**/config/*.yaml")}):
        name = path.stem
        is_own = path.parent == folder / "verl" / "trainer" / "config"
        if name.startswith("_generated") or not ("trainer" in name or (is_own and name in _WITHOUT_TRAINER)):
            continue
        for choice in ("", *_CHOICES.get(name, ())):
            keys = _composed(path, choice.split(), folder)
            if keys:
                yield f"{name} {choice}".strip(), keys


def _composed(path: Path, choices: list[str], folder: Path) -> dict[str, Any]:
    """Leaves of the composed configuration by dotted key; empty where it composes to nothing by itself."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    # Configurations name their search paths from here, and by the package.
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with initialize_config_dir(str(path.parent.resolve()), version_base=None):
        try:
            tree = OmegaConf.to_container(compose(path.stem, overrides=choices), resolve=False)
        except HydraException:
            return {}  # a part of others, or a choice that this release does not have
    return dict(_leaves(tree)) if isinstance(tree, dict) else {}


def _beside(base: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "keys": {key: value for key, value in keys.items() if key not in base or base[key] != value},
        "without": _sections(set(base) - set(keys), keys),
    }


def _sections(missing: set[str], keys: Mapping[str, Any]) -> list[str]:
    """The shortest prefixes that hold the missing keys and none that is there."""
    found = set()
    for key in missing:
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        found.add(
            next((one for one in prefixes if one not in keys and not any(k.startswith(f"{one}.") for k in keys)), key)
        )
    return sorted(found)


def _modules(folder: Path, trainers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path in sorted([*folder.glob("verl/**/*.py"), *folder.glob("recipe/**/*.py")]):
        main = _MAIN.search(path.read_text(encoding="utf-8"))
        name = _NAME.search(main[1]) if main else None
        if name and (config := name[1].removesuffix(".yaml")) in trainers:
            yield ".".join(path.relative_to(folder).with_suffix("").parts), config


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
    found = verl_table(sys.argv[2], Path(sys.argv[3]).resolve()) if sys.argv[1] == "verl" else trl_fields()
    json.dump(found, sys.stdout, indent=0, sort_keys=True, separators=(",", ":"))
    sys.stdout.write("\n")
