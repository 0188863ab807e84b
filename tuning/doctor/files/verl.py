"""A verl configuration: YAML, or a shell script that starts a trainer with Hydra overrides."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import Key, Tree, leaves, nearest_place, read_text, read_yaml
from tuning.doctor.files.hydra_override import HydraOverride, hydra_value, parsed_override
from tuning.doctor.files.shell_script import Command, is_known, read_script
from tuning.doctor.known_keys import (
    BASE,
    ROLLOUT,
    VERL,
    VerlKeys,
    rollout_config,
    trainer_names,
    trainer_of_module,
    verl_keys,
)
from tuning.doctor.values import Values

# Sections of verl's trainers. An override of one of them marks a command as verl's.
_ROOTS = ("data", "actor_rollout_ref", "critic", "algorithm", "trainer", "model", "optim", "rollout", "reward_model")
_ARGUMENT = re.compile(r"\$\d")
# verl finds an NPU by itself.
_NAMES_NPU = re.compile(r"npu|ascend|hccl", re.IGNORECASE)
_NOT_KEYS = ("defaults", "hydra")
_CHOICES = ("model_engine", "engine", "optim")
# So many keys that verl lacks are those of a fork or of another release, not typing errors.
_FORK_KEYS = 3


class VerlKind(StrEnum):
    """The work that a configuration is of."""

    RL = "RL"
    SFT = "SFT"
    GENERATION = "generation"
    ROLLOUT = "rollout"
    """A mapping of RolloutConfig's own fields, which says nothing of training."""


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of a command line. `is_lost` where the command had ended before it."""

    hydra: HydraOverride
    setting: Setting
    is_lost: bool = False

    @property
    def key(self) -> str:
        return self.hydra.key

    @property
    def plus(self) -> str:
        return self.hydra.plus


@dataclass(frozen=True, slots=True)
class VerlFile:
    """`values` are those of a file over verl's defaults; `overrides` those of a script, all of them, in order; `keys`
    those that its trainer has; `given` the settings as their file or command writes them. `unread` says what was left
    out of `values`, and why."""

    values: Values
    overrides: tuple[Override, ...]
    kind: VerlKind
    keys: VerlKeys
    given: tuple[Setting, ...]
    unread: tuple[str, ...] = ()

    @property
    def unknown(self) -> list[Setting]:
        """The settings of keys that verl lacks and no newer key replaced."""
        return [setting for setting in self.given if not self._knows(self.full_key(setting.key))]

    @property
    def is_stock(self) -> bool:
        """True where verl's own trainer runs, so that verl's own checks are made."""
        return self.keys.is_complete and len(self.unknown) < _FORK_KEYS

    def full_key(self, key: str) -> str:
        """The key from the root of verl's configuration."""
        return key if self.kind is not VerlKind.ROLLOUT else ROLLOUT + key

    def _knows(self, key: str) -> bool:
        return self.keys.has(key) or self.keys.is_free(key) or self.keys.renamed(key) != ""

    @property
    def has_trainer(self) -> bool:
        """True if it trains by RL, with engines for its rollouts."""
        return self.kind is VerlKind.RL

    @property
    def has_rollouts(self) -> bool:
        return self.kind is not VerlKind.SFT


def read_verl(path: Path) -> VerlFile:
    """Raises `ConfigError` where the file cannot be read or holds no configuration of verl."""
    text = read_text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_yaml(path)
    return _from_script(path, text)


def _from_script(path: Path, text: str) -> VerlFile:
    script = read_script(path)
    started = [command for command in script.commands if _is_trainer(command)]
    if not started:
        # A script that wants arguments ends before its command. They stand for themselves.
        script = read_script(path, with_arguments=True)
        started = [command for command in script.commands if _is_trainer(command)]
    lists = [command for command in script.commands if _is_override_list(command)]
    if not started and not lists:
        raise ConfigError(
            f"{path}: no override of verl in it; expected words such as data.train_batch_size=1024, or give the YAML "
            "that `--cfg job` prints"
        )
    lines = text.splitlines()
    first_line = started[0].line if started else 0
    words = [(word, first_line) for word in started[0].words] if started else []
    behind = [(word, command.line) for command in lists for word in command.words if command.line >= first_line]
    overrides = [*_overrides(path, lines, words), *_overrides(path, lines, behind, are_lost=bool(started))]
    unread = [f"{path}: {problem}" for problem in script.problems]
    if len(started) > 1:
        unread.append(f"{path}: {len(started)} trainers are started, and the first is read")
    keys, kind, given, notes = _trainer(path, [word for word, _ in words], overrides)
    defaults = dict(keys.defaults)
    for override in overrides:
        if override.is_lost or override.hydra.is_group or override.key in _CHOICES:
            continue
        if override.plus == "~":
            defaults.pop(override.key, None)
            given.pop(override.key, None)
        else:
            given[override.key] = override.setting
    unread += notes
    unread += [
        f"{setting.place}: {setting.key}={setting.value}: a run alone has its value"
        for setting in (override.setting for override in overrides)
        if not is_known(setting.value) or (setting.value == "" and defaults.get(setting.key) not in ("", None))
    ]
    if _NAMES_NPU.search(path.name + text):
        defaults["trainer.device"] = "npu"
    written = tuple(one.setting for one in overrides if not (one.is_lost or one.plus or one.hydra.is_group))
    return VerlFile(Values("verl", given, defaults), tuple(overrides), kind, keys, written, tuple(unread))


def _is_trainer(command: Command) -> bool:
    module = _module(command.words)
    return trainer_of_module(module) != "" or (module != "" and any(_is_of_verl(word) for word in command.words))


def _is_override_list(command: Command) -> bool:
    """True if it begins with an override, as a line does whose command ended before it."""
    return _is_of_verl(command.words[0]) and "." in command.words[0].partition("=")[0]


def _is_of_verl(word: str) -> bool:
    found = parsed_override(word)
    return found is not None and found.key.partition(".")[0] in _ROOTS


def _module(words: Sequence[str]) -> str:
    """The Python module or file that a command runs; "" where it runs none."""
    for index, word in enumerate(words[:-1]):
        if word == "-m":
            return words[index + 1]
    return next((word for word in words if word.endswith(".py") and "=" not in word), "")


def _overrides(
    path: Path, lines: Sequence[str], words: Sequence[tuple[str, int]], *, are_lost: bool = False
) -> Iterator[Override]:
    names = [word for word, _ in words]
    module = _module(names)
    start = names.index(module) + 1 if module else 0
    for word, line in words[start:]:
        found = parsed_override(word)
        if found is None or found.key.startswith("hydra.") or _ARGUMENT.fullmatch(word):
            continue
        place = f"{path}:{_line_of(lines, found.key, word, line)}"
        yield Override(found, Setting(key=found.key, value=found.value, origin="cli", place=place), are_lost)


def _line_of(lines: Sequence[str], key: str, word: str, command_line: int) -> int:
    """The line that writes an override; that of its command where none does, as in a loop over keys."""
    wanted = re.compile(rf"(?<![\w.]){re.escape(key)}=")
    found = [
        number for number, text in enumerate(lines, 1) if wanted.search(text) and not text.lstrip().startswith("#")
    ]
    literal = [number for number in found if word in lines[number - 1]]
    candidates = literal or found
    behind = [number for number in candidates if number >= command_line]
    return (behind or candidates or [command_line])[0 if behind else -1]


def _trainer(
    path: Path, words: Sequence[str], overrides: Sequence[Override]
) -> tuple[VerlKeys, VerlKind, dict[str, Setting], list[str]]:
    """The keys and the kind of the trainer that a command starts, the settings of the configuration file that it names,
    and what could not be read."""
    module = _module(words)
    settings: dict[str, Setting] = {}
    notes: list[str] = []
    name = _option(words, "--config-name").removesuffix(".yaml")
    if not name:
        name = trainer_of_module(module) if module else BASE
    known = trainer_names()
    if name not in known and (file := _config_file(path, _option(words, "--config-path"), name)):
        tree = _read_tree(file)
        name, settings, notes = tree.trainer, tree.settings, tree.unread
    chosen = " ".join(
        f"{override.key}={override.setting.value}"
        for override in overrides
        if override.key in _CHOICES and not override.is_lost
    )
    if f"{name} {chosen}".strip() in known:
        name = f"{name} {chosen}".strip()
    keys = verl_keys(name or module)
    if not keys.is_complete:
        if any(".megatron." in override.key for override in overrides):
            keys = replace(verl_keys("ppo_megatron_trainer"), is_complete=False)
        notes.append(f"{path}: {VERL} has no trainer {name or module}: its keys are not judged")
    return keys, _kind(module, name, overrides), settings, notes


def _option(words: Sequence[str], option: str) -> str:
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else (words[index + 1] if index + 1 < len(words) else "")
    return ""


def _config_file(path: Path, folder: str, name: str) -> Path | None:
    """The file that --config-path and --config-name name, from the script's folder or one above it: a script that calls
    its own working directory the root of the project may stand further down."""
    parts = Path(folder).parts
    for base in (path.parent, *path.resolve().parents):
        for start in range(len(parts) + 1):
            file = base.joinpath(*parts[start:], f"{name}.yaml")
            if name and file.is_file():
                return file
    return None


@dataclass(frozen=True, slots=True)
class _ConfigTree:
    """A YAML file with those that its Hydra `defaults` name, as far as they lie in its folder. `trainer` is the trainer
    of verl that it builds on, "" for none; `names` its sections; `unread` says which defaults were not found."""

    trainer: str
    settings: dict[str, Setting]
    names: tuple[str, ...]
    unread: list[str]


def _read_tree(file: Path, seen: tuple[Path, ...] = ()) -> _ConfigTree:
    """Read a file and its defaults, which come before its own values unless `_self_` stands before them."""
    tree, lines = read_yaml(file, read_text(file))
    listed = tree.get("defaults")
    found = _ConfigTree("", {}, tuple(map(str, tree)), [])
    own = _settings(file, tree, lines)
    has_own = False
    for entry in listed if isinstance(listed, list) else ():
        if entry == "_self_":
            found.settings.update(own)
            has_own = True
        else:
            found = _with_default(found, entry, file, (*seen, file))
    if not has_own:
        found.settings.update(own)
    if found.trainer:  # whose own defaults are in the table
        return replace(found, unread=[])
    return found


def _with_default(found: _ConfigTree, entry: Any, file: Path, seen: tuple[Path, ...]) -> _ConfigTree:
    """Merge one entry of a `defaults` list: a name, or a group with its choice."""
    group, choice = next(iter(entry.items())) if isinstance(entry, dict) and entry else ("", entry)
    folder, _, package = str(group).removeprefix("override ").partition("@")
    if choice is None or folder.startswith("hydra"):
        return found
    if not group and choice in trainer_names():
        return replace(found, trainer=str(choice))
    named = file.parent / folder / f"{choice}.yaml"
    if not named.is_file() or named in seen:
        return replace(found, unread=[*found.unread, f"{file}: its default {entry} is not in its folder"])
    base = _read_tree(named, seen)
    package = (package or folder).replace("/", ".").removeprefix("_global_")
    for key, setting in base.settings.items():
        full = f"{package}.{key}" if package else key
        found.settings[full] = replace(setting, key=full)
    names = (*found.names, package.partition(".")[0]) if package else (*found.names, *base.names)
    return _ConfigTree(found.trainer or base.trainer, found.settings, names, [*found.unread, *base.unread])


def _kind(module: str, name: str, overrides: Sequence[Override]) -> VerlKind:
    if "sft" in name or (not name and "sft" in module):
        return VerlKind.SFT
    if "generation" in module or name in ("generation", "evaluation") or "main_eval" in module:
        return VerlKind.GENERATION
    if any(override.key.startswith("actor_rollout_ref.") for override in overrides) or name != "":
        return VerlKind.RL
    return VerlKind.GENERATION if any(override.key.startswith("rollout.") for override in overrides) else VerlKind.RL


def _from_yaml(path: Path) -> VerlFile:
    tree = _read_tree(path)
    settings, given, unread = tree.settings, tuple(tree.settings.values()), tuple(tree.unread)
    roots = {key.partition(".")[0] for name in trainer_names() for key in verl_keys(name).defaults}
    if tree.trainer or any(name.partition(".")[0] in roots for name in tree.names):
        keys = verl_keys(tree.trainer) if tree.trainer else _nearest_trainer(settings)
        # What a default that is not here gives is unknown.
        keys = replace(keys, is_complete=keys.is_complete and not unread)
        return VerlFile(Values("verl", settings, keys.defaults), (), _kind("", keys.trainer, ()), keys, given, unread)
    if not any(name in rollout_config() for name in tree.names):
        raise ConfigError(f"{path}: no configuration of verl: none of {', '.join(tree.names) or 'its keys'} is a key")
    own = {ROLLOUT + key: setting for key, setting in settings.items()}
    defaults = {ROLLOUT + name: value for name, value in rollout_config().items()}
    values = Values("verl", own, defaults, ROLLOUT)
    keys = VerlKeys("RolloutConfig", {**verl_keys().defaults, **defaults})
    return VerlFile(values, (), VerlKind.ROLLOUT, keys, given, unread)


def _nearest_trainer(settings: Mapping[str, Setting]) -> VerlKeys:
    """The trainer that has the most of the keys; the first of several."""
    return max(map(verl_keys, trainer_names()), key=lambda keys: sum(keys.has(key) for key in settings))


def _settings(path: Path, tree: Tree, lines: Mapping[Key, int]) -> dict[str, Setting]:
    """Leaves by dotted key, with their lines."""
    found = {}
    for key, value in leaves({name: value for name, value in tree.items() if name not in _NOT_KEYS}):
        parts = tuple(map(str, key))
        dotted, line = ".".join(parts), nearest_place(lines, parts, 0)
        place = f"{path}:{line}" if line else str(path)
        value = hydra_value(value) if _is_number_of_hydra(value) else value
        found[dotted] = Setting(key=dotted, value=value, origin="file", place=place)
    return found


def _is_number_of_hydra(value: Any) -> bool:
    """YAML takes 1e-6 for text, OmegaConf for a number."""
    return isinstance(value, str) and isinstance(hydra_value(value), float) and value.strip()[:1] not in "'\""
