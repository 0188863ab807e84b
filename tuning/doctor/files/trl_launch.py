"""The trainer and the server that a shell script starts: `accelerate launch`, `torchrun`, `python` or `trl grpo`, and
`trl vllm-serve`.

The program is looked for from the script's folder and those above, and read without being run: it may be another
trainer than GRPO's, or fill GRPOConfig itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text, read_yaml
from tuning.doctor.files.hydra_override import hydra_value
from tuning.doctor.files.shell_script import Command, is_known, read_script
from tuning.doctor.files.trl_call import (
    CONFIG,
    ConfigCall,
    calls_of,
    names_config,
    parsed,
    read_assignments,
    read_call,
)

# Fields of GRPOConfig that neither transformers nor TRL's other trainers have; more begin with vllm_.
_OF_GRPO = (
    "num_generations", "max_completion_length", "use_vllm", "num_iterations", "scale_rewards", "reward_weights",
    "steps_per_generation", "generation_batch_size", "generation_kwargs", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "epsilon", "epsilon_high", "importance_sampling_level", "mask_truncated_completions",
    "log_completions",
)  # fmt: skip
# Where each launcher says how many processes it starts; Python starts one.
_PROCESSES = {"accelerate": "num_processes", "torchrun": "nproc_per_node", "python": "", "python3": ""}
_TRAINER, _SERVER = ("trl", "grpo"), ("trl", "vllm-serve")


@dataclass(frozen=True, slots=True)
class Launch:
    """A trainer by GRPO as a script starts it. `fields` are those of GRPOConfig: of the program's own call
    (`is_call`), else of the command line and its --config. Without `has_all` it may give more. `processes` is None
    where neither the launcher nor its file says."""

    fields: dict[str, Setting]
    processes: int | None
    is_call: bool = False
    has_all: bool = True
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """`trainer` is the first one by GRPO. `server` are the options of a `trl vllm-serve`, with its line; `shared_gpus`
    those that CUDA_VISIBLE_DEVICES gives to both."""

    trainer: Launch | None
    server: Mapping[str, Setting] = field(default_factory=dict)
    shared_gpus: Setting | None = None
    unread: tuple[str, ...] = ()


def has_grpo_field(names: Iterable[str]) -> bool:
    """True if a name is a field of GRPOConfig alone."""
    return any(name in _OF_GRPO or name.startswith("vllm_") for name in names)


def read_launches(path: Path) -> LaunchScript:
    """Raises `ConfigError` for a script that starts neither a trainer by GRPO nor a server."""
    script = read_script(path)
    unread = [f"{path}: {problem}" for problem in script.problems]
    trainers: list[Launch] = []
    started: list[Command] = []
    others: list[str] = []
    for command in script.commands:
        launcher, program, options = _parts(command.words)
        if not launcher:
            continue
        found = _trainer(f"{path}:{command.line}", path, launcher, program, options)
        if found is None:
            others.append(f"{path}:{command.line}: {program or 'a module'}")
        elif trainers:
            unread.append(f"{path}:{command.line}: one more trainer: give it in a script of its own")
        else:
            trainers.append(found)
            started.append(command)
    server = next((command for command in script.commands if command.words[:2] == _SERVER), None)
    if not trainers and server is None:
        starts = f": {', '.join(others)} is another trainer or program" if others else ""
        raise ConfigError(f"{path}: no `accelerate launch`, `trl grpo` or `trl vllm-serve` of {CONFIG} in it{starts}")
    served = _options(f"{path}:{server.line}", server.words[2:]) if server else {}
    shared = _shared_gpus(path, server, started[0]) if server and started else None
    return LaunchScript(trainers[0] if trainers else None, served, shared, tuple(unread))


def _shared_gpus(path: Path, server: Command, trainer: Command) -> Setting | None:
    both = ",".join(sorted(server.gpus & trainer.gpus))
    place = f"{path}:{trainer.line}"
    return Setting(key="CUDA_VISIBLE_DEVICES", value=both, origin="cli", place=place) if both else None


def _parts(words: Sequence[str]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """The launcher with its own options, the program and the program's options; no launcher where nothing trains."""
    words = tuple(words)
    if words[:2] == _TRAINER:
        return _TRAINER, "", words[2:]
    name = words[0].rpartition("/")[2] if words else ""
    if name not in _PROCESSES or (name == "accelerate" and words[1:2] != ("launch",)):
        return (), "", ()
    index = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if index is None:
        return (words, "", ()) if name == "accelerate" else ((), "", ())
    return (name, *words[1:index]), words[index], words[index + 1 :]


def _trainer(place: str, path: Path, launcher: Sequence[str], program: str, words: Sequence[str]) -> Launch | None:
    """None for a program that does not train by GRPO."""
    processes, options = _processes(place, path, launcher), _options(place, words)
    set_later = ConfigCall({}, True, ())
    if source := _file(path, program) if program else None:
        tree = parsed(source)
        if not names_config(tree):
            return None
        if len(calls_of(tree)) == 1:
            call = read_call(source, tree)
            return Launch(call.fields, processes, True, call.has_all, call.unread)
        set_later = read_assignments(source, tree)
    given, unread = _with_config(path, options)
    if source is None and launcher != _TRAINER and not has_grpo_field(given):
        return _unfound(place, program, processes) if launcher[0] == "accelerate" else None
    unread += [
        f"{setting.place}: {setting.key}={setting.value}: a run alone has it"
        for setting in given.values()
        if not is_known(setting.value)
    ]
    unread += set_later.unread
    return Launch(given | set_later.fields, processes, has_all="config" not in given, unread=tuple(unread))


def _unfound(place: str, program: str, processes: int | None) -> Launch:
    what = f"{program} is not found from here, and" if program else "a module"
    return Launch({}, processes, has_all=False, unread=(f"{place}: {what} may be any trainer",))


def _with_config(path: Path, options: dict[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """The options over the fields of the YAML that --config names. A file that is not found stays an option."""
    named = options.get("config")
    if named is None:
        return options, []
    file = _file(path, str(named.value))
    if file is None:
        return options, [f"{named.place}: --config {named.value} is not found from here"]
    return yaml_fields(file) | {name: value for name, value in options.items() if name != "config"}, []


def yaml_fields(path: Path) -> dict[str, Setting]:
    tree, lines = read_yaml(path, read_text(path))
    return {
        str(name): Setting(key=str(name), value=_plain(value), origin="file", place=f"{path}:{lines[(str(name),)]}")
        for name, value in tree.items()
    }


def _plain(value: object) -> object:
    """YAML takes 1e-6 and "true" for text; TRL's parser for a number and a boolean."""
    if not isinstance(value, str):
        return value
    found = hydra_value(value)
    return found if isinstance(found, (bool, float)) else value


def _processes(place: str, path: Path, launcher: Sequence[str]) -> int | None:
    option = _PROCESSES.get(launcher[0])
    if option == "":
        return 1
    given = _options(place, launcher[1:])
    number: Any = given[option].value if option in given else None
    if number is None and "config_file" in given and (file := _file(path, str(given["config_file"].value))):
        number = read_yaml(file, read_text(file))[0].get("num_processes")
    return number if isinstance(number, int) else None


def _file(script: Path, name: str) -> Path | None:
    """The file of that name from the script's folder or one above; None without it."""
    for folder in (script.parent, *script.resolve().parents):
        if (folder / name).is_file():
            return folder / name
    return None


def _options(place: str, words: Sequence[str]) -> dict[str, Setting]:
    """`--key value`, `--key=value` and `--key` alone, which is true; dashes and underscores are one."""
    found: dict[str, Setting] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        key, equals, text = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        value = hydra_value(text) if equals else (True if following.startswith("--") else hydra_value(following))
        name = key.replace("-", "_")
        found[name] = Setting(key=name, value=value, origin="cli", place=place)
    return found
