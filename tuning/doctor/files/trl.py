"""A TRL configuration: YAML or JSON with fields of GRPOConfig; a Python file with a plain GRPOConfig(...) call, which
is never run; a shell script that launches a trainer or `trl vllm-serve`.
"""

import ast
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text, read_yaml
from tuning.doctor.files.shell_script import Command, is_known, read_script
from tuning.doctor.known_keys import trl_defaults
from tuning.doctor.values import Values, hydra_value

_CONFIG = "GRPOConfig"
# Fields of GRPOConfig that neither transformers nor TRL's other trainers have; more begin with vllm_.
_OF_GRPO = (
    "num_generations", "max_completion_length", "use_vllm", "num_iterations", "scale_rewards", "reward_weights",
    "steps_per_generation", "generation_batch_size", "generation_kwargs", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "epsilon", "epsilon_high", "importance_sampling_level", "mask_truncated_completions",
    "log_completions",
)  # fmt: skip
# Where each launcher says how many processes it starts; Python starts one.
_PROCESSES = {"accelerate": "num_processes", "torchrun": "nproc_per_node", "python": "", "python3": "", "trl": ""}
_TRAINER, _SERVER = ("trl", "grpo"), ("trl", "vllm-serve")


@dataclass(frozen=True, slots=True)
class TrlFile:
    """`values` are those of GRPOConfig; `is_call` where they stand in a call, which takes no other names: YAML and
    command lines may hold other classes' too. `server` are the options of a `trl vllm-serve`, with its line.
    `processes` are those that a launcher starts, None where neither it nor its file says. `shared_gpus` are those of
    server and trainer both. `unread` says what was left out.
    """

    values: Values
    is_call: bool = False
    server: Mapping[str, Setting] = field(default_factory=dict)
    processes: int | None = None
    has_trainer: bool = True
    shared_gpus: Setting | None = None
    unread: tuple[str, ...] = ()


def read_trl(path: Path) -> TrlFile:
    """Raises `ConfigError` where the file cannot be read, or holds no GRPOConfig."""
    text = read_text(path)
    if path.suffix == ".py":
        return _from_call(path, text)
    if path.suffix == ".sh":
        return _from_script(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name must end in .yaml, .yml, .json, .py or .sh")
    given = _yaml_fields(path)
    if not _has_grpo_field(given):
        raise ConfigError(
            f"{path}: none of its keys is a field of {_CONFIG} alone, such as num_generations: "
            f"{', '.join(given) or 'it is empty'}"
        )
    return TrlFile(_values(given))


def _values(given: Mapping[str, Setting], *, has_all: bool = True) -> Values:
    """Without all that is given, a default may be another value in a run."""
    return Values(given, trl_defaults() if has_all else {})


def _has_grpo_field(names: Iterable[str]) -> bool:
    return any(name in _OF_GRPO or name.startswith("vllm_") for name in names)


def _from_call(path: Path, text: str) -> TrlFile:
    """Read the keywords that are literals. What is computed or spread is unread."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: not Python: {error.msg}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_config(node.func)]
    if len(calls) != 1:
        found = ", ".join(f"line {call.lineno}" for call in calls) or "none"
        instead = "" if calls or _CONFIG not in text else ": give the script that launches it, with its options"
        raise ConfigError(f"{path}: one call of {_CONFIG}(...) is expected, there is {found}{instead}")
    given, unread, has_all = dict[str, Setting](), list[str](), True
    for keyword in calls[0].keywords:
        place, name = f"{path}:{keyword.value.lineno}", keyword.arg or "**"
        value, is_literal = _literal(keyword.value)
        has_all = has_all and keyword.arg is not None
        if not is_literal or not keyword.arg:
            unread.append(f"{place}: {name}={ast.unparse(keyword.value)}: a run alone has its value")
        if keyword.arg:
            given[name] = Setting(key=name, value=value, origin="file", place=place)
    return TrlFile(_values(given, has_all=has_all), is_call=True, unread=tuple(unread))


def _is_config(node: ast.expr) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) == _CONFIG


def _literal(node: ast.expr) -> tuple[Any, bool]:
    try:
        return ast.literal_eval(node), True
    except ValueError:
        return None, False


def _from_script(path: Path) -> TrlFile:
    """The first trainer by GRPO, with the server. Raises `ConfigError` for a script that starts neither."""
    commands = read_script(path)
    trainers = [(command, launch) for command in commands if (launch := _launch(command.words))]
    server = next((command for command in commands if command.words[:2] == _SERVER), None)
    served = _options(f"{path}:{server.line}", server.words[2:]) if server else {}
    unread = list[str]()
    found: TrlFile | None = None
    for command, (launcher, _, words) in trainers:
        place = f"{path}:{command.line}"
        given, notes = _with_config(path, _options(place, words))
        is_grpo = launcher == _TRAINER or _has_grpo_field(given) or bool(notes)
        if is_grpo and found is not None:
            unread.append(f"{place}: one more trainer: give it in a script of its own")
        elif is_grpo:
            unread += notes
            unread += [
                f"{one.place}: {one.key}={one.value}: a run alone has it"
                for one in given.values()
                if not is_known(one.value)
            ]
            found = TrlFile(
                _values(given, has_all=not notes),
                server=served,
                processes=_processes(place, path, launcher),
                shared_gpus=_shared_gpus(place, server, command) if server else None,
            )
    if found is None and server is None:
        others = ", ".join(f"{path}:{command.line}: {launch[1] or 'a module'}" for command, launch in trainers)
        starts = f": {others} has no field of {_CONFIG} on its command line" if others else ""
        raise ConfigError(f"{path}: no `accelerate launch`, `trl grpo` or `trl vllm-serve` of {_CONFIG} in it{starts}")
    return replace(found or TrlFile(_values({}), server=served, has_trainer=False), unread=tuple(unread))


def _shared_gpus(place: str, server: Command, trainer: Command) -> Setting | None:
    both = ",".join(sorted(server.gpus & trainer.gpus))
    return Setting(key="CUDA_VISIBLE_DEVICES", value=both, origin="cli", place=place) if both else None


def _launch(words: tuple[str, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """The launcher with its own options, the program and the program's options; None where nothing trains."""
    if words[:2] == _TRAINER:
        return _TRAINER, "", words[2:]
    name = words[0].rpartition("/")[2] if words else ""
    index = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if name not in _PROCESSES or name == "trl" or index is None or (name == "accelerate" and words[1] != "launch"):
        return None
    return (name, *words[1:index]), words[index], words[index + 1 :]


def _with_config(path: Path, options: dict[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """The options over the fields of the YAML that --config names, and a note of a file that is not found."""
    named = options.pop("config", None)
    if named is None:
        return options, []
    file = _file(path, str(named.value))
    if file is None:
        return options, [f"{named.place}: --config {named.value} is not found from here"]
    return _yaml_fields(file) | options, []


def _yaml_fields(path: Path) -> dict[str, Setting]:
    tree, lines = read_yaml(path, read_text(path))
    return {
        str(name): Setting(key=str(name), value=_plain(value), origin="file", place=f"{path}:{lines[(str(name),)]}")
        for name, value in tree.items()
    }


def _plain(value: object) -> object:
    """YAML takes 1e-6 and "true" for text; TRL's parser for a number and a boolean."""
    found = hydra_value(value) if isinstance(value, str) else value
    return found if isinstance(found, (bool, float)) else value


def _processes(place: str, path: Path, launcher: Sequence[str]) -> int | None:
    option = _PROCESSES[launcher[0]]
    if not option:
        return 1
    given = _options(place, launcher[1:])
    number: Any = given[option].value if option in given else None
    if number is None and "config_file" in given and (file := _file(path, str(given["config_file"].value))):
        number = read_yaml(file, read_text(file))[0].get("num_processes")
    return number if isinstance(number, int) else None


def _file(script: Path, name: str) -> Path | None:
    """The file of that name from the script's folder or one above; None without it."""
    folders = (script.parent, *script.resolve().parents)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _options(place: str, words: Sequence[str]) -> dict[str, Setting]:
    """`--key value`, `--key=value` and `--key` alone, which is true; dashes and underscores are one."""
    found: dict[str, Setting] = {}
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            name = key.replace("-", "_")
            value = True if not equals and following.startswith("--") else _scalar(text if equals else following)
            found[name] = Setting(key=name, value=value, origin="cli", place=place)
    return found


def _scalar(text: str) -> Any:
    """An option's value: JSON where it is a dictionary."""
    try:
        return json.loads(text) if text.startswith("{") else hydra_value(text)
    except ValueError:
        return text
