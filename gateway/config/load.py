"""Merging of file, environment and command line into one `Config`: default < file < environment < command line.

A wrong key or value is reported with its place (file and line, variable or argument), its value and the nearest key.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from engines.config import EngineConfig
from engines.errors import ConfigError, UsageError
from engines.types import EngineKind
from gateway.config.schema import Config
from gateway.config.sources import (
    Given,
    Key,
    Origin,
    dotted,
    field_at,
    from_file,
    leaves,
    nearest,
    put_environment,
    put_overrides,
    read_text,
)

HIDDEN = "**********"
_KEY_FILE = "file:"
_USER = re.compile(r"//[^/@\s]+@")
"""User and password of a URL."""
_SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD)$", re.IGNORECASE)
"""Variables of engines whose values are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of the configuration, and its source."""

    key: str
    value: Any
    origin: Origin
    place: str


def load(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """Merge file, environment and command line."""
    return validated(collected(path, overrides, environ), path)


def explain(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> list[Setting]:
    """List every value of the same configuration with its source. Keys are hidden."""
    given = collected(path, overrides, environ)
    tree = validated(given, path).model_dump(mode="json")
    return [_setting(given, key, value) for key, value in leaves(tree)]


def collected(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Given:
    """Return what file, environment and command line give, with the places."""
    given = from_file(path) if path else Given()
    put_environment(given, environ)
    put_overrides(given, overrides)
    return given


def validated(given: Given, path: Path | None = None) -> Config:
    """Return the configuration. Relative paths start in the current folder, or in that of the file at `path`."""
    try:
        config = Config.model_validate(given.tree)
    except ValidationError as error:
        lines = dict.fromkeys(_report(given, dict(problem)) for problem in error.errors(include_url=False))
        kind = UsageError if all(line.startswith("argument ") for line in lines) else ConfigError
        raise kind("\n".join(lines)) from None
    return _with_paths_found(config, given, [Path.cwd(), path.resolve().parent] if path else [Path.cwd()])


def with_secrets(config: Config, environ: Mapping[str, str] = os.environ) -> Config:
    """Replace `env:NAME` and `file:PATH` by the keys found there.

    The gateway's own files stay references, since it reads them again when they change; here they are only checked.
    """
    lists = {
        name: [key for item in getattr(config.gateway, name) for key in _for_gateway(f"gateway.{name}", item, environ)]
        for name in ("inference_keys", "admin_keys")
    }
    config = config.model_copy(update={"gateway": config.gateway.model_copy(update=lists)})
    return _with_engines(config, lambda engine, section: _with_key(dotted(section), engine, environ))


def key_variables(config: Config) -> tuple[str, ...]:
    """List the environment variables that the configuration names for keys, which engines need not see."""
    gateway, groups = config.gateway, config.groups.values()
    items = [*gateway.inference_keys, *gateway.admin_keys, *(group.api_key for group in groups if group.api_key)]
    references = (item.get_secret_value().partition(":") for item in items)
    return tuple(sorted({name for kind, _, name in references if kind == "env"}))


def _for_gateway(key: str, item: SecretStr, environ: Mapping[str, str]) -> list[SecretStr]:
    found = revealed(key, item.get_secret_value(), environ)
    return [item] if key_file(item.get_secret_value()) else [SecretStr(text) for text in found]


def _with_key(section: str, engine: EngineConfig, environ: Mapping[str, str]) -> EngineConfig:
    if engine.api_key is None:
        return engine
    found = revealed(f"{section}.api_key", engine.api_key.get_secret_value(), environ)
    if len(found) > 1:
        raise ConfigError(f"{section}.api_key: {len(found)} keys where one is expected")
    return engine.model_copy(update={"api_key": SecretStr(found[0])})


def revealed(key: str, text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the keys that `env:NAME` or `file:PATH` refers to; any other text is a key. `key` is for messages."""
    if (path := key_file(text)) is not None:
        try:
            return keys_in(path)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    kind, _, variable = text.partition(":")
    if kind != "env" or not variable:
        return [text]
    if not (found := environ.get(variable, "").replace(",", " ").split()):
        raise ConfigError(f"{key}: no key in {text}, as seen by the process that reads it")
    return found


def key_file(item: str) -> Path | None:
    """Return the file of `file:PATH`, which holds one or more keys; None for another item of the configuration."""
    path = item.removeprefix(_KEY_FILE)
    return Path(path).expanduser() if path and path != item else None


def keys_in(path: Path) -> list[str]:
    """Return the keys of a file. Raise `ConfigError` where it holds none, for the process that reads it."""
    found = read_text(path).split()
    if not found:
        raise ConfigError(f"no key in {path}, as seen by the process that reads it")
    return found


def _report(given: Given, problem: dict[str, Any]) -> str:
    place, key = _blamed(given, tuple(problem["loc"]))
    if problem["type"] == "extra_forbidden":
        said = "" if place == f"argument {dotted(key)}: " else f"{dotted(key)}: "
        return f"{place}{said}unknown key; {nearest(key)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return place + message
    return f"{place}{dotted(key)}{_shown(key, problem['input'])}: {message[0].lower()}{message[1:]}"


def _shown(key: Key, value: Any) -> str:
    """Show the value at fault, unless it is a key or a whole section."""
    if _is_secret(key):
        return f" = {HIDDEN}"
    return "" if isinstance(value, dict) or value is None else f" = {_USER.sub(f'//{HIDDEN}@', repr(value))}"


def _is_secret(key: Key) -> bool:
    if key[-2:-1] == ("env",) and _SECRET_VARIABLE.search(str(key[-1])):
        return True
    found = field_at(key) or field_at(key[:-1])
    return found is not None and "SecretStr" in repr(found.annotation)


def _blamed(given: Given, key: Key) -> tuple[str, Key]:
    """Return the place of the key to mend, for a message, and that key, which may be one of `engine`. A value that was
    not given has the place of the nearest section around it."""
    for n in range(len(key), -1, -1):
        if found := _key_given(given, key[:n]):
            _, place = given.place(found)
            return f"{place}: " if place else "", found if n == len(key) else key
    return "", key


def _key_given(given: Given, key: Key) -> Key | None:
    """Return the key under which the value at `key` was given; None where it is a default. A group's come from
    `engine`."""
    inherited = [("engine", *key[2:])] if key[:1] == ("engines",) and len(key) > 2 else []
    return next((candidate for candidate in (key, *inherited) if given.has(candidate)), None)


def _with_paths_found(config: Config, given: Given, bases: Sequence[Path]) -> Config:
    """Make model folders and Pythons absolute: engines start in another folder, perhaps in another shell."""

    def found(engine: EngineConfig, section: Key) -> EngineConfig:
        if engine.kind in (EngineKind.SIM, EngineKind.EXTERNAL):
            return engine
        paths = {name: _found(getattr(engine, name), (*section, name), given, bases) for name in ("model", "python")}
        return engine.model_copy(update=paths)

    return _with_engines(config, found)


def _with_engines(config: Config, changed: Callable[[EngineConfig, Key], EngineConfig]) -> Config:
    """Change each engine group. With groups, `engine` is nothing but their defaults: it starts no server of its own,
    and its key may be nowhere to be found."""
    if not config.engines:
        return config.model_copy(update={"engine": changed(config.engine, ("engine",))})
    engines = {name: changed(engine, ("engines", name)) for name, engine in config.engines.items()}
    return config.model_copy(update={"engines": engines})


def _found(path: str, key: Key, given: Given, bases: Sequence[Path]) -> str:
    """Return the absolute path of a model folder or Python. Model ids and absolute paths are unchanged."""
    is_python = key[-1] == "python"
    if not path:
        return path
    for base in bases:
        there = base / os.path.expanduser(path)  # unlike pathlib's, it lets a user pass who does not exist
        if there.is_file() if is_python else there.is_dir():
            # The Python of a virtual environment is a link, and knows its environment by where the link is.
            return os.path.abspath(there) if is_python else str(there.resolve())
    # A model id has at most one slash and no leading dot.
    is_relative = not os.path.isabs(path) and (path.startswith((".", "~")) or path.count("/") > 1)
    if is_relative or (is_python and not os.path.isabs(os.path.expanduser(path))):
        place, blamed = _blamed(given, key)
        looked = " nor ".join(dict.fromkeys(str(base) for base in bases))
        raise ConfigError(
            f"{place}{dotted(blamed)} = {path!r}: no such {'file' if is_python else 'folder'} under "
            f"{looked}; start from the folder it is relative to (with `serve deploy`: run `ray start` there), "
            "or write an absolute path"
        )
    return path


def _setting(given: Given, key: Key, value: Any) -> Setting:
    if _is_secret(key) and value is not None:
        value = [HIDDEN for _ in value] if isinstance(value, list) else HIDDEN
    found = _key_given(given, key)
    origin, place = given.place(found) if found else ("default", "")
    return Setting(key=dotted(key), value=value, origin=origin, place=place)
