"""A TRL configuration: YAML or JSON with fields of GRPOConfig, or a Python file, whose GRPOConfig(...) call is read and
never run.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text, read_yaml
from gateway.tuning.doctor.known_keys import trl_defaults
from gateway.tuning.doctor.values import Values

_CALL = "GRPOConfig"


@dataclass(frozen=True, slots=True)
class TrlFile:
    """`is_call` where the fields stand in a call, which takes no other names; YAML may hold other classes' too."""

    values: Values
    is_call: bool


def read_trl(path: Path) -> TrlFile:
    """Raises `ConfigError` where the file cannot be read, or holds no GRPOConfig."""
    text = read_text(path)
    if path.suffix == ".py":
        return TrlFile(_values(_from_python(path, text)), is_call=True)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name must end in .yaml, .yml, .json or .py")
    tree, lines = read_yaml(path, text)
    if not any(name in trl_defaults() for name in tree):
        raise ConfigError(
            f"{path}: none of its keys is a field of {_CALL}: {', '.join(map(str, tree)) or 'it is empty'}"
        )
    given = {
        str(name): Setting(key=str(name), value=_plain(value), origin="file", place=f"{path}:{lines[(str(name),)]}")
        for name, value in tree.items()
    }
    return TrlFile(_values(given), is_call=False)


def _values(given: dict[str, Setting]) -> Values:
    return Values("TRL", given, trl_defaults())


def _plain(value: object) -> object:
    """YAML takes 1e-6 for text; TRL's parser for a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _from_python(path: Path, text: str) -> dict[str, Setting]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not Python: {error.msg}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == _CALL]
    if len(calls) != 1:
        found = ", ".join(f"line {call.lineno}" for call in calls) or "none"
        raise ConfigError(f"{path}: one call of {_CALL}(...) is expected, there is {found}")
    return {
        keyword.arg: Setting(
            key=keyword.arg, value=_literal(keyword.value), origin="file", place=f"{path}:{keyword.value.lineno}"
        )
        for keyword in calls[0].keywords
        if keyword.arg
    }


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.expr) -> object:
    """What is written; a name or a call, which only a run could tell, as its source text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
