"""The command line of each engine group, and the configuration key behind every word of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engines.config import EngineConfig
from engines.process.launch import engine_command
from engines.types import EngineKind
from gateway.config.load import HIDDEN, SECRET_VARIABLE, Setting
from gateway.config.schema import Config

# Ports and seeds are assigned when a replica starts.
_PORT = 0
_SEED = "<engine.seed + the replica's number>"
_AT_START = {"--port": "<free port>", "--seed": _SEED, "--random-seed": _SEED}
_OURS = "rollout-gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An argument or variable, the key behind it (empty where there is none), and the origin of its value."""

    text: str
    key: str
    origin: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One engine group. `command` is empty for an external server at `url`."""

    group: str
    kind: str
    num_replicas: int
    url: str
    command: tuple[str, ...] = ()
    arguments: tuple[Part, ...] = ()
    environment: tuple[Part, ...] = ()


def explain_engines(config: Config, settings: Sequence[Setting]) -> list[Explanation]:
    """Explain each group of `config`; `settings` are its values with their origins, from `load.explain`.

    Raises `ConfigError` where the engine is not installed here, or refuses an argument.
    """
    return [_explain_group(name, group, bool(config.engines), settings) for name, group in config.groups.items()]


def _explain_group(name: str, group: EngineConfig, is_named: bool, settings: Sequence[Setting]) -> Explanation:
    section = f"engines.{name}" if is_named else "engine"
    given = {setting.key: setting for setting in settings}
    explanation = Explanation(group=name, kind=group.kind, num_replicas=group.num_replicas, url=group.url)
    if group.kind is EngineKind.EXTERNAL:
        return explanation
    command = engine_command(group, port=_PORT, index=0)
    arguments = [_part(group.python, f"{section}.python", given)] if group.python else []
    words = list(command.argv[: len(command.argv) - sum(len(a.words) for a in command.arguments)])
    for argument in command.arguments:
        shown = (argument.flag, _AT_START[argument.flag]) if argument.flag in _AT_START else argument.words
        words += shown
        arguments.append(_part(" ".join(shown), f"{section}.{argument.key}" if argument.key else "", given))
    environment = (
        _part(
            f"{variable}={_shown(variable, value)}", f"{section}.env.{variable}" if variable in group.env else "", given
        )
        for variable, value in command.env.items()
    )
    return replace(explanation, command=tuple(words), arguments=tuple(arguments), environment=tuple(environment))


def _shown(variable: str, value: str) -> str:
    return HIDDEN if SECRET_VARIABLE.search(variable) else value


def _part(text: str, key: str, given: Mapping[str, Setting]) -> Part:
    if not key:
        return Part(text=text, key="", origin=_OURS, place="")
    found = _setting(key, given)
    return Part(text=text, key=key, origin=found.origin if found else "default", place=found.place if found else "")


def _setting(key: str, given: Mapping[str, Setting]) -> Setting | None:
    """Return the value at `key`; for a section, the first of its values that is not a default."""
    if key in given:
        return given[key]
    below = [setting for name, setting in given.items() if name.startswith(f"{key}.")]
    return next((setting for setting in below if setting.origin != "default"), None)
