"""Where values come from: a file, the environment, the command line. Each becomes a tree that knows its own places.

Their meaning and precedence belong to `load.py`.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from engines.errors import ConfigError
from gateway.config.schema import Config

PREFIX = "ROLLOUT_GATEWAY_"
SERVE_IMPORT_PATH = "gateway.app:build"

T = TypeVar("T")
Key = tuple[str | int, ...]
# "live" is a running server.
Origin = Literal["default", "file", "env", "cli", "live"]
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`places` says where a key stands in it; a key without a place stands where its parent does."""

    origin: Origin
    tree: Tree
    places: Mapping[Key, str] = field(default_factory=dict)

    def value(self, key: Key) -> Any:
        """Return the value at `key`. Raises `LookupError` or `TypeError` where there is none."""
        here: Any = self.tree
        for part in key:
            here = here[part]
        return here

    def holds(self, key: Key) -> bool:
        try:
            self.value(key)
        except (LookupError, TypeError):
            return False
        return True

    def place(self, key: Key) -> str:
        return nearest_place(self.places, key, "")


def nearest_place(places: Mapping[Key, T], key: Key, otherwise: T) -> T:
    """Return the place of a key, or that of the nearest section around it that has a place."""
    return next((places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in places), otherwise)


def from_file(path: Path) -> Source:
    """A plain tree, or a Serve deploy document whose application's `args` is the tree."""
    text = read_text(path)
    lines: dict[Key, int] = {}  # tomllib tells none
    if path.suffix == ".toml":
        tree = _read_toml(path, text)
    elif path.suffix in (".yaml", ".yml", ".json"):
        tree, lines = read_yaml(path, text)
    else:
        raise ConfigError(f"{path}: the name must end in .yaml, .yml, .json or .toml")
    if "applications" in tree:
        tree, lines = _read_serve_document(path, tree, lines)
    # `gateway:` with nothing under it means a section left as it is.
    tree = {key: {} if value is None and nested_model(field_at((key,))) else value for key, value in tree.items()}
    places = {key: f"{path}:{line}" for key, line in lines.items()} or {(key,): str(path) for key in tree}
    return Source(origin="file", tree=tree, places=places)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_yaml(path: Path, text: str) -> tuple[Tree, dict[Key, int]]:
    """The tree, and the line of each of its keys."""
    try:
        tree = (
            yaml.safe_load(text) or {}
        )  # first, since it refuses keys that are no plain values, as in `{{ template }}`
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = dict(_yaml_lines(path, root)) if root else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: a mapping of keys to values is expected, this is a {type(tree).__name__}")
    return tree, lines


def _yaml_lines(path: Path, node: yaml.Node, key: Key = ()) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if name.value in seen:  # YAML itself would let the last one win
                dotted = ".".join(map(str, (*key, name.value)))
                raise ConfigError(f"{path}:{line}: {dotted}: already given on line {seen[name.value]}")
            seen[name.value] = line
            yield (*key, name.value), line
            yield from _yaml_lines(path, value, (*key, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*key, index), item.start_mark.line + 1
            yield from _yaml_lines(path, item, (*key, index))


def _read_toml(path: Path, text: str) -> Tree:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _read_serve_document(path: Path, document: Tree, lines: dict[Key, int]) -> tuple[Tree, dict[Key, int]]:
    """The tree in `args`, with Serve's own settings where the tree has a key for them, each with its own line."""
    index, application = _our_application(path, document, lines)
    root: Key = ("applications", index)
    renamed: dict[Key, Key] = {
        (*root, "name"): ("name",),
        ("proxy_location",): ("serve", "proxy_location"),
        ("http_options", "host"): ("serve", "http_host"),
        ("http_options", "port"): ("serve", "http_port"),
    }
    silent: set[Key] = {
        ("applications",),
        ("http_options",),
        (*root, "import_path"),
        (*root, "route_prefix"),
        (*root, "args"),
    }
    tree: Tree = {}
    places: dict[Key, int] = {}
    for key, value in leaves({**document, "applications": {index: {**application, "args": None}}}):
        if key in renamed:
            put(tree, renamed[key], value)
            places[renamed[key]] = lines.get(key, 1)
        elif key not in silent:
            dotted = ".".join(map(str, key))
            raise ConfigError(
                f"{path}:{nearest_place(lines, key, 1)}: {dotted}: rollout-gateway does not carry this key to Serve; "
                "deploy the file with `serve deploy`, or leave the key out"
            )
    arguments = application.get("args") or {}
    args_root = (*root, "args")
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"{path}:{nearest_place(lines, args_root, 1)}: {'.'.join(map(str, args_root))}: a mapping of the "
            f"configuration's sections is expected, this is a {type(arguments).__name__}"
        )
    places |= {key[len(args_root) :]: line for key, line in lines.items() if key[: len(args_root)] == args_root}
    return merge(tree, arguments), places


def _our_application(path: Path, document: Tree, lines: Mapping[Key, int]) -> tuple[int, Tree]:
    applications = document["applications"]
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, dict) and application.get("import_path") == SERVE_IMPORT_PATH:
            return index, application
    line = lines.get(("applications",), 1)
    raise ConfigError(f"{path}:{line}: applications: none has import_path: {SERVE_IMPORT_PATH}")


def leaves(tree: Mapping[Any, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield each value that is no section, with its key; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*key, name))
        else:
            yield (*key, name), value


def from_environment(environ: Mapping[str, str]) -> Source:
    """ROLLOUT_GATEWAY_SECTION__KEY=value, sections as JSON or YAML too."""
    return from_pairs("env", _variables(environ))


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX):
            continue
        key: Key = tuple(name[len(PREFIX) :].lower().split("__"))
        if key[0] in Config.model_fields:
            yield key, environ[name], f"environment variable {name}"
        elif len(key) > 1:
            raise ConfigError(f"environment variable {name}: unknown section {key[0]}; {_advice(key)}")
        # Kubernetes makes ROLLOUT_GATEWAY_PORT and its like for a service of our name.


def from_overrides(arguments: Sequence[str]) -> Source:
    """`--a.b 2`, `--a.b=2` and `a.b=2`; values are YAML."""
    return from_pairs(
        "cli", ((tuple(dotted.split(".")), text, f"argument {shown}") for shown, dotted, text in _pairs(arguments))
    )


def from_pairs(origin: Origin, pairs: Iterable[tuple[Key, Any, str]]) -> Source:
    """Build a source from keys with their values and places. Text is read as on the command line."""
    tree: Tree = {}
    places: dict[Key, str] = {}
    for key, value, place in pairs:
        dotted = ".".join(map(str, key))
        try:
            put(tree, key, parse_value(value, field_at(key)))
        except yaml.YAMLError as error:
            raise ConfigError(f"{place}: {dotted}: {value!r} is not a YAML value") from error
        except TypeError as error:
            raise ConfigError(f"{place}: {dotted}: a value is already given above this key") from error
        places[key] = place
    return Source(origin=origin, tree=tree, places=places)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not equals:
            follows = next(rest, None) if argument.startswith("--") else None
            if follows is None or follows.startswith("--"):
                raise ConfigError(f"argument {argument}: expected --key value, --key=value or key=value")
            value = follows
        dotted = name.removeprefix("--")
        if not re.fullmatch(r"[^.\s-][^.\s]*(\.[^.\s]+)*", dotted):
            raise ConfigError(
                f"argument {argument.split('=')[0]}: no key; expected --key value, --key=value or key=value"
            )
        yield name, dotted, value


def parse_value(text: Any, field: FieldInfo | None) -> Any:
    """A YAML scalar, but plain text where the key holds text, and split at commas where it holds a list.

    Items of a list are YAML by themselves; anything else was parsed before.
    """
    if isinstance(text, list):
        return [yaml.safe_load(item) if isinstance(item, str) else item for item in text]
    if not isinstance(text, str):
        return text
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
    if _is_list(field):
        return split_list(text)
    return text if _holds_text(field.annotation) else value


def split_list(text: str) -> Any:
    """JSON, or items separated by commas."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, list) else [item.strip() for item in text.split(",") if item.strip()]


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


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


def _advice(key: Key) -> str:
    return nearest(key) or "the sections are " + ", ".join(Config.model_fields)


def nearest(key: Key) -> str:
    """The remedy for an unknown key: its neighbour by spelling, or the same word elsewhere in the tree."""
    model = _resolved(key[:-1])[1]
    names = list(model.model_fields) if model else []
    wrong = str(key[-1])
    close = difflib.get_close_matches(wrong, names, n=1)
    if close:
        return f"did you mean {'.'.join(map(str, (*key[:-1], close[0])))}?"
    elsewhere = {dotted.rpartition(".")[2]: dotted for dotted in reversed(list(_known_keys(Config)))}
    close = difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.8)
    if close:
        return f"did you mean {elsewhere[close[0]]}?"
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


def put(tree: Tree, key: Key, value: Any) -> None:
    *parents, last = (str(part) for part in key)
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise TypeError(parent)
    tree[last] = value
