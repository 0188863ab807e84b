"""A TRL configuration: YAML or JSON with fields of GRPOConfig; a Python file, whose GRPOConfig(...) call is read and
never run; a shell script that launches a trainer or `trl vllm-serve`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.errors import ConfigError
from gateway.config.load import Setting
from gateway.config.sources import read_text
from tuning.doctor.files.trl_call import CONFIG, parsed, read_call
from tuning.doctor.files.trl_launch import has_grpo_field, read_launches, yaml_fields
from tuning.doctor.known_keys import trl_defaults
from tuning.doctor.values import Values

# Keys that `accelerate config` writes, and TRL does not read.
_OF_ACCELERATE = ("compute_environment", "distributed_type", "num_machines")


@dataclass(frozen=True, slots=True)
class TrlFile:
    """`values` are those of GRPOConfig; `is_call` where they stand in a call, which takes no other names: YAML and
    command lines may hold other classes' too. `server` are the options of a `trl vllm-serve`, with its line.
    `processes` are those that a launcher starts, None where neither it nor its file says. `shared_gpus` are those of
    server and trainer both. `unread` says what was left out.
    """

    values: Values
    is_call: bool
    server: Mapping[str, Setting] = field(default_factory=dict)
    processes: int | None = None
    has_trainer: bool = True
    shared_gpus: Setting | None = None
    unread: tuple[str, ...] = ()


def read_trl(path: Path) -> TrlFile:
    """Raises `ConfigError` where the file cannot be read, or holds no GRPOConfig."""
    read_text(path)
    if path.suffix == ".py":
        call = read_call(path, parsed(path))
        return TrlFile(_values(call.fields, has_all=call.has_all), is_call=True, unread=call.unread)
    if path.suffix == ".sh":
        return _from_script(path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: the name must end in .yaml, .yml, .json, .py or .sh")
    return TrlFile(_values(_from_data(path)), is_call=False)


def _values(given: dict[str, Setting], *, has_all: bool = True) -> Values:
    """Without all that is given, a default may be another value in a run."""
    return Values("TRL", given, trl_defaults() if has_all else {})


def _from_data(path: Path) -> dict[str, Setting]:
    given = yaml_fields(path)
    if any(name in given for name in _OF_ACCELERATE):
        raise ConfigError(f"{path}: a configuration of accelerate, which has no field of {CONFIG}")
    if not has_grpo_field(given):
        raise ConfigError(
            f"{path}: none of its keys is a field of {CONFIG} alone, such as num_generations: "
            f"{', '.join(given) or 'it is empty'}"
        )
    return given


def _from_script(path: Path) -> TrlFile:
    script = read_launches(path)
    trainer = script.trainer
    if trainer is None:
        return TrlFile(_values({}), False, script.server, has_trainer=False, unread=script.unread)
    return TrlFile(
        _values(trainer.fields, has_all=trainer.has_all),
        is_call=trainer.is_call,
        server=script.server,
        processes=trainer.processes,
        shared_gpus=script.shared_gpus,
        unread=(*script.unread, *trainer.unread),
    )
