"""The call of GRPOConfig(...) in a Python file, which is read and never run."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text
from tuning.doctor.known_keys import trl_defaults

CONFIG = "GRPOConfig"
_MOST_NAMES = 8  # that stand for each other

# Expressions by field; False where a condition or another assignment decides.
Fields = dict[str, tuple[ast.expr, bool]]


@dataclass(frozen=True, slots=True)
class ConfigCall:
    """The fields of a call. Without `has_all`, a spread dictionary may have more. `unread` says what was left out."""

    fields: dict[str, Setting]
    has_all: bool
    unread: tuple[str, ...]


def parsed(path: Path) -> ast.Module:
    """Raises `ConfigError` where the file is no Python."""
    try:
        return ast.parse(read_text(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not Python: {error.msg}") from error


def names_config(tree: ast.Module) -> bool:
    """True if the program uses GRPOConfig at all, such as for a parser of its command line."""
    return any(isinstance(node, (ast.Name, ast.Attribute)) and _name(node) == CONFIG for node in ast.walk(tree))


def calls_of(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == CONFIG]


def read_call(path: Path, tree: ast.Module) -> ConfigCall:
    """Raises `ConfigError` where there is not one call."""
    calls = calls_of(tree)
    if len(calls) != 1:
        found = ", ".join(f"line {call.lineno}" for call in calls) or "none"
        instead = "" if calls or not names_config(tree) else ": give the script that launches it, with its options"
        raise ConfigError(f"{path}: one call of {CONFIG}(...) is expected, there is {found}{instead}")
    keywords, unread = _keywords(path, calls[0], _constants(tree))
    certain = {name: (node, True) for name, node in keywords.items()}
    return _settings(path, tree, certain | _added(tree, calls[0]) | _assigned(tree), unread)


def read_assignments(path: Path, tree: ast.Module) -> ConfigCall:
    """The fields that the program sets after its parser has made the configuration."""
    return _settings(path, tree, _assigned(tree), [])


def _settings(path: Path, tree: ast.Module, fields: Fields, unread: list[str]) -> ConfigCall:
    names, has_all = _constants(tree), not unread
    settings = {}
    for name, (node, is_certain) in fields.items():
        place = f"{path}:{node.lineno}"
        try:
            value = _computed(node, names) if is_certain else None
        except ValueError:
            value = None
        if value is None and not (is_certain and isinstance(node, ast.Constant)):
            unread.append(f"{place}: {name}={ast.unparse(node)}: a run alone has its value")
        settings[name] = Setting(key=name, value=value, origin="file", place=place)
    return ConfigCall(settings, has_all, tuple(unread))


def _assigned(tree: ast.Module) -> Fields:
    """The fields that are set on a configuration, as in `args.use_vllm = True`."""
    holders = {name for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _configured(node)}
    certain = set(map(id, _certain(tree.body)))
    found: Fields = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        target = node.targets[0]
        if isinstance(target.value, ast.Name) and target.value.id in holders and target.attr in trl_defaults():
            found[target.attr] = node.value, id(node) in certain and target.attr not in found
    return found


def _configured(node: ast.Assign) -> list[str]:
    """The names that an assignment gives a configuration, or what a parser such as TrlParser returns."""
    call = node.value
    if not isinstance(call, ast.Call) or not (_name(call.func) == CONFIG or _name(call.func).startswith("parse_args_")):
        return []
    return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _certain(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that every run of the program comes to, those of its functions among them."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            yield from _certain(node.body)


def _added(tree: ast.Module, call: ast.Call) -> Fields:
    """The fields that assignments such as `common["beta"] = 0.1` add to the dictionaries that the call spreads."""
    spread = {keyword.value.id for keyword in call.keywords if isinstance(keyword.value, ast.Name) and not keyword.arg}
    found: Fields = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
            continue
        target = node.targets[0]
        if isinstance(target.value, ast.Name) and target.value.id in spread and isinstance(target.slice, ast.Constant):
            found[str(target.slice.value)] = node.value, False
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
