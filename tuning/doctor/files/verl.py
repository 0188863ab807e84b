"""A verl configuration: YAML, such as `--cfg job` prints, or a shell script that starts a trainer with overrides."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import leaves, nearest_place, read_text, read_yaml
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
from tuning.doctor.values import Values, hydra_value

# Sections of verl's trainers. An override of one of them marks a command as verl's.
_ROOTS = ("data", "actor_rollout_ref", "critic", "algorithm", "trainer", "rollout", "reward_model")
_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_NO_RL = re.compile(r"sft|eval|generation")
# verl finds an NPU by itself.
_NAMES_NPU = re.compile(r"npu|ascend|hccl", re.IGNORECASE)
_ENGINE = "model_engine"
_RESOLVED = "give the YAML that `--cfg job` prints, or that a run saved"
# So many keys that verl lacks are those of a fork or of another release, not typing errors.
_FORK_KEYS = 3


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of a command line. `is_lost` where the command had ended before it."""

    plus: str
    setting: Setting
    is_lost: bool = False

    @property
    def key(self) -> str:
        return self.setting.key


@dataclass(frozen=True, slots=True)
class VerlFile:
    """`values` are those of a file over verl's defaults; `overrides` those of a script, all of them, in order; `keys`
    those that its trainer has; `given` the settings as their file or command writes them. Without `has_trainer` it is
    a mapping of RolloutConfig's own fields. `unread` says what was left out of `values`, and why."""

    values: Values
    overrides: tuple[Override, ...]
    keys: VerlKeys
    given: tuple[Setting, ...]
    has_trainer: bool = True
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
        return key if self.has_trainer else ROLLOUT + key

    def _knows(self, key: str) -> bool:
        return self.keys.has(key) or self.keys.is_free(key) or self.keys.renamed(key) != ""


def read_verl(path: Path) -> VerlFile:
    """Raises `ConfigError` where the file cannot be read or holds no configuration of verl with rollouts."""
    text = read_text(path)
    return _from_yaml(path) if path.suffix in (".yaml", ".yml", ".json") else _from_script(path, text)


def _from_script(path: Path, text: str) -> VerlFile:
    commands = read_script(path)
    if not any(map(_is_trainer, commands)):
        # A script that wants arguments ends before its command. They stand for themselves.
        commands = read_script(path, *(f"${number}" for number in range(1, 10)))
    started = [command for command in commands if _is_trainer(command)]
    lists = [command for command in commands if _is_override(command.words[0], behind_dot=True)]
    if not started and not lists:
        raise ConfigError(
            f"{path}: no override of verl in it; expected words such as data.train_batch_size=1024, or give the YAML "
            "that `--cfg job` prints"
        )
    first = started[0] if started else Command((), 0)
    behind = [word for command in lists if command.line >= first.line for word in command.words]
    lines = text.splitlines()
    overrides = [
        *_overrides(path, lines, first.words, first.line, is_lost=False),
        *_overrides(path, lines, behind, first.line, is_lost=bool(started)),
    ]
    unread = []
    if len(started) > 1:
        unread.append(f"{path}: {len(started)} trainers are started, and the first is read")
    keys = _keys(path, first.words, overrides)
    if not keys.is_complete:
        unread.append(f"{path}: {VERL} has no trainer {keys.trainer}: its keys are not judged")
    defaults = dict(keys.defaults)
    counted = [one for one in overrides if not one.is_lost and one.key != _ENGINE]
    given = {one.key: one.setting for one in counted}
    unread += [
        f"{one.setting.place}: {one.key}={one.setting.value}: a run alone has its value"
        for one in overrides
        if not is_known(one.setting.value) or (one.setting.value == "" and defaults.get(one.key) not in ("", None))
    ]
    if _NAMES_NPU.search(path.name + text):
        defaults["trainer.device"] = "npu"
    written = tuple(one.setting for one in counted if not one.plus)
    return VerlFile(Values(given, defaults), tuple(overrides), keys, written, unread=tuple(unread))


def _is_trainer(command: Command) -> bool:
    module = _module(command.words)
    return trainer_of_module(module) != "" or (module != "" and any(map(_is_override, command.words)))


def _is_override(word: str, *, behind_dot: bool = False) -> bool:
    """True for an override of verl. A command that begins with one is a list of them, whose own command had ended."""
    found = _OVERRIDE.fullmatch(word)
    return bool(found and found[2].partition(".")[0] in _ROOTS and ("." in found[2] or not behind_dot))


def _module(words: Sequence[str]) -> str:
    """The Python module or file that a command runs; "" where it runs none."""
    module = next((after for word, after in itertools.pairwise(words) if word == "-m"), "")
    return module or next((word for word in words if word.endswith(".py") and "=" not in word), "")


def _overrides(
    path: Path, lines: Sequence[str], words: Sequence[str], line: int, *, is_lost: bool
) -> Iterator[Override]:
    for word in words:
        if (found := _OVERRIDE.fullmatch(word)) and not found[2].startswith("hydra."):
            place = f"{path}:{_line_of(lines, found[2], word, line)}"
            setting = Setting(key=found[2], value=hydra_value(found[3]), origin="cli", place=place)
            yield Override(found[1], setting, is_lost)


def _line_of(lines: Sequence[str], key: str, word: str, line: int) -> int:
    """The line that writes an override; that of its command where none does, as in a loop over keys."""
    wanted = re.compile(rf"^[^#]*(?<![\w.]){re.escape(key)}=")
    found = [number for number, text in enumerate(lines, 1) if wanted.search(text)]
    literal = [number for number in found if word in lines[number - 1]]
    return (literal or found or [line])[-1]


def _keys(path: Path, words: Sequence[str], overrides: Sequence[Override]) -> VerlKeys:
    """The keys of the trainer that a command starts. Raises `ConfigError` where it takes a configuration that is not
    verl's own, which Hydra alone composes."""
    module, named = _module(words), _option(words, "--config-name").removesuffix(".yaml")
    if _NO_RL.search(module):
        raise ConfigError(f"{path}: {module} does not train by rollouts")
    if named and named not in trainer_names():
        raise ConfigError(f"{path}: --config-name {named} is not verl's own: {_RESOLVED}")
    name = named or (trainer_of_module(module) if module else BASE)
    engine = next((f" {_ENGINE}={one.setting.value}" for one in overrides if one.key == _ENGINE), "")
    keys = verl_keys(name + engine if name + engine in trainer_names() else name or module)
    if not keys.is_complete and any(".megatron." in one.key for one in overrides):
        return replace(verl_keys("ppo_megatron_trainer"), trainer=module, is_complete=False)
    return keys


def _option(words: Sequence[str], option: str) -> str:
    text = "\0".join(words)
    found = re.search(rf"(?:^|\0){option}[=\0]([^\0]*)", text)
    return found[1] if found else ""


def _from_yaml(path: Path) -> VerlFile:
    content, lines = read_yaml(path, read_text(path))
    trainer = _trainer_of(path, content.pop("defaults", None))
    content.pop("hydra", None)
    settings = {}
    for key, value in leaves(content):
        parts = tuple(map(str, key))
        line, dotted = nearest_place(lines, parts, 0), ".".join(parts)
        place = f"{path}:{line}" if line else str(path)
        settings[dotted] = Setting(key=dotted, value=_of_omegaconf(value), origin="file", place=place)
    sections, given = {key.partition(".")[0] for key in settings}, tuple(settings.values())
    if trainer or sections & {*_ROOTS, *(key.partition(".")[0] for key in verl_keys().defaults)}:
        keys = verl_keys(trainer) if trainer else _nearest_trainer(settings)
        return VerlFile(Values(settings, keys.defaults), (), keys, given)
    if not sections & rollout_config().keys():
        raise ConfigError(f"{path}: no configuration of verl: none of {', '.join(sections) or 'its keys'} is a key")
    own = {ROLLOUT + key: setting for key, setting in settings.items()}
    defaults = {ROLLOUT + name: value for name, value in rollout_config().items()}
    keys = VerlKeys("RolloutConfig", {**verl_keys().defaults, **defaults})
    return VerlFile(Values(own, defaults, ROLLOUT), (), keys, given, has_trainer=False)


def _trainer_of(path: Path, defaults: Any) -> str:
    """The trainer of verl that Hydra's `defaults` name. Raises `ConfigError` for others, which Hydra alone composes."""
    names = (
        [name for name in defaults or () if name != "_self_"]
        if isinstance(defaults, (list, type(None)))
        else [defaults]
    )
    if names and not (len(names) == 1 and names[0] in trainer_names()):
        raise ConfigError(f"{path}: its defaults are in other files: {_RESOLVED}")
    return names[0] if names else ""


def _nearest_trainer(settings: Mapping[str, Setting]) -> VerlKeys:
    """The trainer that has the most of the keys; the first of several."""
    return max(map(verl_keys, trainer_names()), key=lambda keys: sum(keys.has(key) for key in settings))


def _of_omegaconf(value: Any) -> Any:
    """YAML takes 1e-6 for text, OmegaConf for a number."""
    found = hydra_value(value) if isinstance(value, str) else value
    return found if isinstance(found, float) else value
