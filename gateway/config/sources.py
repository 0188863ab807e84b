"""Where values come from: a file, the environment, the command line. Later ones win, and each knows its place.

Their meaning belongs to `load.py`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from engines.errors import ConfigError, UsageError
from gateway.config.schema import Config

PREFIX = "ROLLOUT_GATEWAY_"

T = TypeVar("T")
Key = tuple[str | int, ...]
# "live" is a running server.
Origin = Literal["default", "file", "env", "cli", "live"]
Tree = dict[str, Any]


@dataclass(slots=True)
class Given:
    """A tree of values. `places` says where a key stands, by source and in words; one without stands where its parent
    does."""

    tree: Tree = field(default_factory=dict)
    places: dict[Key, tuple[Origin, str]] = field(default_factory=dict)

    def has(self, key: Key) -> bool:
        here: Any = self.tree
        try:
            for part in key:
                here = here[part]
        except (LookupError, TypeError):
            return False
        return True

    def place(self, key: Key) -> tuple[Origin, str]:
        return nearest_place(self.places, key, ("default", ""))

    def put(self, key: Key, value: Any, origin: Origin, place: str) -> None:
        """Put a value in place of the one before; of a section, only what it has."""
        section = value
        for part in reversed(key):
            section = {str(part): section}
        self.tree = merge(self.tree, section)
        below = [leaf for leaf, _ in leaves(value, key)] if isinstance(value, dict) else []
        around = [key[:n] for n in range(1, len(key))]  # at fault where such a section is unknown
        self.places = dict.fromkeys(around, (origin, place)) | self.places
        self.places |= dict.fromkeys((key, *below), (origin, place))

    def put_text(self, key: Key, text: str, origin: Origin, place: str) -> None:
        """Put a value that is read from text."""
        try:
            self.put(key, parse_value(text, field_at(key)), origin, place)
        except yaml.YAMLError as error:
            raise ConfigError(f"{place}: {dotted(key)}: {text!r} is not a YAML value") from error


def nearest_place(places: Mapping[Key, T], key: Key, otherwise: T) -> T:
    """Return the place of a key, or that of the nearest section around it that has a place."""
    return next((places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places), otherwise)


def from_file(path: Path) -> Given:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name must end in .yaml, .yml or .json")
    tree, lines = read_yaml(path, read_text(path))
    # `gateway:` with nothing under it means a section left as it is.
    tree = {key: {} if value is None and nested_model(field_at((key,))) else value for key, value in tree.items()}
    return Given(tree, {key: ("file", f"{path}:{line}") for key, line in lines.items()})


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: it is no UTF-8 text") from error


def read_yaml(path: Path, text: str) -> tuple[Tree, dict[Key, int]]:
    """The tree, and the line of each of its keys."""
    try:
        tree = yaml.safe_load(text) or {}  # first: it refuses keys that are no plain values, as in `{{ template }}`
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = dict(_yaml_lines(path, root)) if root else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, problem = f":{mark.line + 1}" if mark else "", getattr(error, "problem", None) or error
        raise ConfigError(f"{path}{line}: not YAML: {problem}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: a mapping of keys to values is expected, this is a {type(tree).__name__}")
    return tree, lines


def _yaml_lines(path: Path, node: yaml.Node, key: Key = ()) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if name.value in seen:  # YAML itself would let the last one win
                raise ConfigError(
                    f"{path}:{line}: {dotted((*key, name.value))}: already given on line {seen[name.value]}"
                )
            seen[name.value] = line
            yield (*key, name.value), line
            yield from _yaml_lines(path, value, (*key, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*key, index), item.start_mark.line + 1
            yield from _yaml_lines(path, item, (*key, index))


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def leaves(tree: Mapping[Any, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield each value that is no section, with its key; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*key, name))
        else:
            yield (*key, name), value


def put_environment(given: Given, environ: Mapping[str, str]) -> None:
    """Take ROLLOUT_GATEWAY_SECTION__KEY=value, sections as JSON or YAML too."""
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX):
            continue
        key: Key = tuple(name[len(PREFIX) :].lower().split("__"))
        if key[0] in Config.model_fields:
            given.put_text(key, environ[name], "env", f"environment variable {name}")
        elif len(key) > 1:
            raise ConfigError(f"environment variable {name}: unknown section {key[0]}; {nearest(key[:1])}")
        # Kubernetes makes ROLLOUT_GATEWAY_PORT and its like for a service of our name.


def put_overrides(given: Given, arguments: Sequence[str]) -> None:
    """Take `--a.b 2`, `--a.b=2` and `a.b=2`; values are YAML."""
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not equals and argument.startswith("--"):
            value = next(rest, "--")
        is_given = equals or (argument.startswith("--") and not value.startswith("--"))
        if not is_given or not re.fullmatch(r"(--)?[^.\s-][^.\s]*(\.[^.\s]+)*", name):
            raise UsageError(f"argument {name}: expected --key value, --key=value or key=value")
        given.put_text(tuple(name.removeprefix("--").split(".")), value, "cli", f"argument {name}")


def parse_value(text: str, field: FieldInfo | None) -> Any:
    """A YAML scalar, but plain text where the key holds text, and split at commas where it holds a list."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        if field is None or not _holds_text(field.annotation):
            raise
        value = text  # such as a key that begins with @
    if field is None or isinstance(value, (list, dict)):
        return value
    if value is None and (text or type(None) in get_args(field.annotation)):
        return None
    if get_origin(field.annotation) is list:
        return [item.strip() for item in text.split(",") if item.strip()]
    return text if _holds_text(field.annotation) else value


def _holds_text(annotation: Any) -> bool:
    return annotation in (str, SecretStr) or any(_holds_text(part) for part in get_args(annotation))


def field_at(key: Key) -> FieldInfo | None:
    """The field that a key names, if it names one."""
    return _resolved(key)[0]


def nested_model(field: FieldInfo | None) -> type[BaseModel] | None:
    return _as_model(field.annotation) if field else None


def _resolved(key: Key) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """The field that a key names, and the section: `gateway` is both, `engines.NAME` is an item and no field."""
    field: FieldInfo | None = None
    model: type[BaseModel] | None = Config
    for part in key:
        if field is not None and get_origin(field.annotation) is dict:
            model = _as_model(get_args(field.annotation)[1])
            field = None
        elif model is not None and part in model.model_fields:
            field = model.model_fields[str(part)]
            model = nested_model(field)
        else:
            return None, None
    return field, model


def _as_model(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def nearest(key: Key) -> str:
    """The remedy for an unknown key: its neighbour by spelling, or the same word elsewhere in the tree."""
    model = _resolved(key[:-1])[1]
    names = {name: dotted((*key[:-1], name)) for name in model.model_fields} if model else {}
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(list(_known_keys(Config)))}
    for known, cutoff in ((names, 0.6), (elsewhere, 0.8)):
        if close := difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=cutoff):
            return f"did you mean {known[close[0]]}?"
    return f"the keys here are {', '.join(names)}" if names else ""


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, found in model.model_fields.items():
        yield prefix + name
        if nested := nested_model(found):
            yield from _known_keys(nested, f"{prefix}{name}.")


def merge(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where both say something, `above` counts."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged
