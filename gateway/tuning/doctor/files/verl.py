"""A verl configuration: YAML, or a shell script that gives Hydra overrides. Neither is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import Tree, read_text, read_yaml
from gateway.tuning.doctor.files.shell_script import Word, read_commands
from gateway.tuning.doctor.known_keys import ROLLOUT, VerlKeys, verl_keys
from gateway.tuning.doctor.values import Values

_OVERRIDE = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w-]*(?:\.[\w@-]+)*)=(.*)", re.DOTALL)
# What a command that trains is called with.
_TRAINER = re.compile(r"\bverl\b|\bmain_\w+")
# In a file with several of them.
_NOT_KEYS = ("defaults", "hydra")


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of a command line. `is_lost` where the command had ended before it."""

    key: str
    plus: str
    setting: Setting
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class VerlFile:
    """`values` hold what a file gives over verl's defaults; `overrides` are those of a script, all of them, in order.

    `has_trainer` is False for a mapping of RolloutConfig's own fields, which says nothing of training.
    `keys` are those that it may have: in a script those of the trainers that it calls.
    """

    values: Values
    overrides: tuple[Override, ...]
    has_trainer: bool
    keys: VerlKeys


def read_verl(path: Path) -> VerlFile:
    """Raises `ConfigError` where the file cannot be read or holds no configuration of verl."""
    text = read_text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_tree(path, *read_yaml(path, text))
    overrides = tuple(_overrides(path, text))
    if not overrides:
        raise ConfigError(f"{path}: no override of verl in it; expected words such as data.train_batch_size=1024")
    given = {one.key: one.setting for one in overrides if not one.is_lost and one.plus != "~"}
    keys = verl_keys().of(name for name in verl_keys().of_trainers if name in text)
    return VerlFile(Values("verl", given, keys.defaults), overrides, has_trainer=True, keys=keys)


def _overrides(path: Path, text: str) -> Iterator[Override]:
    has_begun = False
    for command in read_commands(text):
        first = command.words[0].text
        is_alone = not command.is_list and "." in first.partition("=")[0] and bool(_OVERRIDE.fullmatch(first))
        for word in command.words:
            if found := _override(path, word, is_lost=is_alone and has_begun):
                yield found
        has_begun = has_begun or any(_TRAINER.search(word.text) for word in command.words)


def _override(path: Path, word: Word, *, is_lost: bool) -> Override | None:
    found = _OVERRIDE.fullmatch(word.text)
    if found is None:
        return None
    plus, key, text = found[1] or "", found[2], found[3]
    if "." not in key or key.startswith("hydra."):
        return None  # a variable, or a choice between groups of keys
    setting = Setting(key=key, value=_parsed(text), origin="cli", place=f"{path}:{word.line}")
    return Override(key, plus, setting, is_lost)


def _parsed(text: str) -> Any:
    """Hydra's own grammar is near to YAML; 1e-6 is a number there."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _from_tree(path: Path, tree: Tree, lines: Mapping[tuple[str | int, ...], int]) -> VerlFile:
    keys = verl_keys().of(verl_keys().of_trainers)
    roots = {key.partition(".")[0] for key in keys.defaults}
    leaves = list(_leaves({name: value for name, value in tree.items() if name not in _NOT_KEYS}))
    is_whole = any(str(name).partition(".")[0] in roots for name in tree)
    if not is_whole and not any(name in keys.rollout_config for name in tree):
        raise ConfigError(
            f"{path}: no configuration of verl: none of {', '.join(map(str, tree)) or 'its keys'} is a key"
        )
    prefix = "" if is_whole else ROLLOUT
    given = {}
    for parts, value in leaves:
        dotted = ".".join(parts)
        place = next((f"{path}:{lines[parts[:n]]}" for n in range(len(parts), 0, -1) if parts[:n] in lines), str(path))
        value = _parsed(value) if isinstance(value, str) and "${" not in value else value
        given[prefix + dotted] = Setting(key=dotted, value=value, origin="file", place=place)
    defaults = keys.defaults if is_whole else {ROLLOUT + name: value for name, value in keys.rollout_config.items()}
    return VerlFile(Values("verl", given, defaults, prefix), (), has_trainer=is_whole, keys=keys)


def _leaves(tree: Tree, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*parts, str(name)))
        else:
            yield (*parts, str(name)), value
