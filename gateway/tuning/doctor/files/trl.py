"""A TRL configuration: YAML or JSON with fields of GRPOConfig; a Python file, whose GRPOConfig(...) call is read and
never run; a shell script with `accelerate launch` or `trl vllm-serve`.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text, read_yaml
from gateway.tuning.doctor.files.hydra_override import hydra_value
from gateway.tuning.doctor.files.shell_script import Command, is_known, read_script
from gateway.tuning.doctor.known_keys import trl_defaults
from gateway.tuning.doctor.values import Values

_CALL = "GRPOConfig"
# Keys that `accelerate config` writes, and TRL does not read.
_OF_ACCELERATE = ("compute_environment", "distributed_type", "num_machines")
# Fields of GRPOConfig that neither transformers nor TRL's other trainers have; more begin with vllm_.
_OF_GRPO = (
    "num_generations", "max_completion_length", "use_vllm", "num_iterations", "scale_rewards", "reward_weights",
    "steps_per_generation", "generation_batch_size", "generation_kwargs", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "epsilon", "epsilon_high", "importance_sampling_level", "mask_truncated_completions",
    "log_completions",
)  # fmt: skip
_MOST_NAMES = 8  # that stand for each other


@dataclass(frozen=True, slots=True)
class TrlFile:
    """`values` are those of GRPOConfig; `is_call` where they stand in a call, which takes no other names: YAML and
    command lines may hold other classes' too. `server` are the options of a `trl vllm-serve`, with its line.
    `processes` are those that `accelerate launch` starts, None where neither it nor its file says, or where nothing
    `is_launched`. `unread` says what was left out.
    """

    values: Values
    is_call: bool
    server: Mapping[str, Setting] = field(default_factory=dict)
    processes: int | None = None
    is_launched: bool = False
    has_trainer: bool = True
    unread: tuple[str, ...] = ()


def read_trl(path: Path) -> TrlFile:
    """Raises `ConfigError` where the file cannot be read, or holds no GRPOConfig."""
    text = read_text(path)
    if path.suffix == ".py":
        return _from_python(path, text)
    if path.suffix == ".sh":
        return _from_script(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name must end in .yaml, .yml, .json, .py or .sh")
    tree, lines = read_yaml(path, text)
    if any(name in tree for name in _OF_ACCELERATE):
        raise ConfigError(f"{path}: a configuration of accelerate, which has no field of {_CALL}")
    if not any(name in _OF_GRPO or str(name).startswith("vllm_") for name in tree):
        raise ConfigError(
            f"{path}: none of its keys is a field of {_CALL} alone, such as num_generations: "
            f"{', '.join(map(str, tree)) or 'it is empty'}"
        )
    given = {
        str(name): Setting(key=str(name), value=_plain(value), origin="file", place=f"{path}:{lines[(str(name),)]}")
        for name, value in tree.items()
    }
    return TrlFile(_values(given), is_call=False)


def _values(given: dict[str, Setting], *, are_all: bool = True) -> Values:
    """Without all that is given, a default may be another value in a run."""
    return Values("TRL", given, trl_defaults() if are_all else {})


def _plain(value: object) -> object:
    """YAML takes 1e-6 and "true" for text; TRL's parser for a number and a boolean."""
    if not isinstance(value, str):
        return value
    found = hydra_value(value)
    return found if isinstance(found, (bool, float)) else value


def _from_script(path: Path) -> TrlFile:
    script = read_script(path)
    launch = next((command for command in script.commands if command.words[:2] == ("accelerate", "launch")), None)
    serve = next((command for command in script.commands if command.words[:2] == ("trl", "vllm-serve")), None)
    grpo = next((command for command in script.commands if command.words[:2] == ("trl", "grpo")), None)
    trainer = launch or grpo
    if trainer is None and serve is None:
        raise ConfigError(f"{path}: no `accelerate launch`, `trl grpo` or `trl vllm-serve` in it")
    given, processes = _launched(path, trainer) if trainer else ({}, None)
    unread = [f"{path}: {problem}" for problem in script.problems]
    unread += [
        f"{setting.place}: {setting.key}={setting.value}: a run alone has it"
        for setting in given.values()
        if not is_known(setting.value)
    ]
    server = _options(path, serve.words[2:], serve.line) if serve else {}
    return TrlFile(_values(given), False, server, processes, trainer is not None, trainer is not None, tuple(unread))


def _launched(path: Path, command: Command) -> tuple[dict[str, Setting], int | None]:
    """The options of the trainer, and the processes that the launcher is asked for."""
    words = command.words[2:]
    program = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    of_launcher = _options(path, words[:program], command.line)
    number = of_launcher["num_processes"].value if "num_processes" in of_launcher else None
    if number is None and "config_file" in of_launcher:
        number = _processes_of(path, str(of_launcher["config_file"].value))
    return _options(path, words[program:], command.line), number if isinstance(number, int) else None


def _processes_of(script: Path, name: str) -> Any:
    """The processes in accelerate's file, which is named from the script's folder or one above; None without it."""
    for folder in (script.parent, *script.resolve().parents):
        if (folder / name).is_file():
            return read_yaml(folder / name, read_text(folder / name))[0].get("num_processes")
    return None


def _options(path: Path, words: Sequence[str], line: int) -> dict[str, Setting]:
    """`--key value`, `--key=value` and `--key` alone, which is true; dashes and underscores are one."""
    found: dict[str, Setting] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        key, equals, text = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        value = hydra_value(text) if equals else (True if following.startswith("--") else hydra_value(following))
        name = key.replace("-", "_")
        found[name] = Setting(key=name, value=value, origin="cli", place=f"{path}:{line}")
    return found


def _from_python(path: Path, text: str) -> TrlFile:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not Python: {error.msg}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == _CALL]
    if len(calls) != 1:
        found = ", ".join(f"line {call.lineno}" for call in calls) or "none"
        raise ConfigError(f"{path}: one call of {_CALL}(...) is expected, there is {found}")
    names = _constants(tree)
    keywords, unread = _keywords(path, calls[0], names)
    are_all, added = not unread, _added(tree, calls[0])
    settings = {}
    for name, node in (keywords | added).items():
        place = f"{path}:{node.lineno}"
        try:
            value = None if name in added else _computed(node, names)
        except ValueError:
            value = None
        if name in added or (value is None and not isinstance(node, ast.Constant)):
            unread.append(f"{place}: {name}={ast.unparse(node)}: a run alone has its value")
        settings[name] = Setting(key=name, value=value, origin="file", place=place)
    return TrlFile(_values(settings, are_all=are_all), is_call=True, unread=tuple(unread))


def _added(tree: ast.Module, call: ast.Call) -> dict[str, ast.expr]:
    """The fields that assignments such as `common["beta"] = 0.1` add to the dictionaries that the call spreads."""
    spread = {keyword.value.id for keyword in call.keywords if isinstance(keyword.value, ast.Name) and not keyword.arg}
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
            continue
        target = node.targets[0]
        if isinstance(target.value, ast.Name) and target.value.id in spread and isinstance(target.slice, ast.Constant):
            found[str(target.slice.value)] = node.value
    return found


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The expressions of names that the file assigns once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [node.target]
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value or target)
    return {
        name: values[0] for name, values in found.items() if len(values) == 1 and not isinstance(values[0], ast.Name)
    }


def _keywords(path: Path, call: ast.Call, names: Mapping[str, ast.expr]) -> tuple[dict[str, ast.expr], list[str]]:
    """Keywords of a call, with those of a dictionary that two stars spread; and what could not be spread."""
    found: dict[str, ast.expr] = {}
    unread = []
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg:
            found[keyword.arg] = value
            continue
        spread = names.get(value.id) if isinstance(value, ast.Name) else value
        pairs = _pairs(spread)
        if pairs is None:
            unread.append(f"{path}:{value.lineno}: **{ast.unparse(value)}: a run alone has its fields")
        found.update(pairs or {})
    return found, unread


def _pairs(node: ast.expr | None) -> dict[str, ast.expr] | None:
    """The fields of {...} or dict(...) with plain names; None for anything else."""
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            str(key.value): value
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _computed(node: ast.expr, names: Mapping[str, ast.expr], hops: int = _MOST_NAMES) -> Any:
    """A literal, a name of one, or whole-number arithmetic on them. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Name) and node.id in names and hops:
        return _computed(names[node.id], names, hops - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)):
        left, right = (_computed(side, names, hops) for side in (node.left, node.right))
        if all(type(side) is int for side in (left, right)) and not (isinstance(node.op, ast.FloorDiv) and right == 0):
            operation = {
                ast.Add: int.__add__,
                ast.Sub: int.__sub__,
                ast.Mult: int.__mul__,
                ast.FloorDiv: int.__floordiv__,
            }
            return operation[type(node.op)](left, right)
        raise ValueError("no arithmetic on whole numbers")
    return ast.literal_eval(node)
