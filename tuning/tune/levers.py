"""The levers that `tune` may change, and the grid of settings that it tries."""

import itertools
from collections.abc import Mapping, Sequence

import yaml
from pydantic import ValidationError

from engines.config import EngineConfig
from engines.errors import ConfigError, UsageError
from engines.levers import LEVERS
from engines.process.launch import gpus_per_replica
from engines.types import EngineKind

Value = int | float | str | bool | None
Setting = Mapping[str, Value]
"""The levers that differ from the start; empty for the start itself."""

# What may change without a change of what is computed.
_NAMES = (
    "max_num_seqs", "enforce_eager", "api_server_count", "max_num_batched_tokens", "stream_interval",
    "gpu_memory_utilization", "max_cudagraph_capture_size", "enable_prefix_caching", "enable_chunked_prefill",
)  # fmt: skip
_MAY_CHANGE = {lever.name: lever for lever in LEVERS if lever.name in _NAMES}
_LEAST_SEQS = 8
_API_SERVERS = 4


def grid(engine: EngineConfig, given: Sequence[str], completions: int, num_gpus: int) -> list[Setting]:
    """Return every setting of the levers `given` as NAME=VALUE,VALUE, else of those that matter for this engine.

    The first has the value of each lever that other measurements (docs/benchmarks.md) favour, or that was given first,
    and the others follow by how many differ from it: a budget that runs out leaves the least likely untried.
    `completions` are in flight at a time. Raise `ConfigError` on a wrong name or value.
    """
    if engine.kind is EngineKind.EXTERNAL:
        raise ConfigError(
            "engine.kind = 'external': the gateway does not start that engine, and tune has to restart it"
        )
    tried = dict(map(_parse, given)) if given else _usual(engine, completions)
    for name, values in tried.items() if given else ():
        for value in values:
            _check(engine, name, value)
    if (needed := gpus_per_replica(engine)) > num_gpus:
        raise ConfigError(f"a replica needs {needed} GPUs, and {num_gpus} are here")
    axes = [[(name, value) for value in (*values, getattr(engine, name))] for name, values in tried.items()]
    found = sorted(
        itertools.product(*(list(dict.fromkeys(axis)) for axis in axes)),
        key=lambda cell: sum(pair != axis[0] for pair, axis in zip(cell, axes, strict=True)),
    )
    settings = [{name: value for name, value in cell if value != getattr(engine, name)} for cell in found]
    return [setting for setting in settings if setting and _is_possible(engine, setting)]


def applied(engine: EngineConfig, setting: Setting) -> EngineConfig:
    """Return the engine with these levers. Raise `ConfigError` for values that exclude each other."""
    try:
        return EngineConfig.model_validate(engine.model_dump() | dict(setting))
    except ValidationError as error:
        raise ConfigError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None


def text_of(setting: Setting) -> str:
    return " ".join(f"{name}={_said(value)}" for name, value in setting.items()) or "start"


def _usual(engine: EngineConfig, completions: int) -> dict[str, tuple[Value, ...]]:
    """Return room for all completions at a time, and less; CUDA graphs; several API processes."""
    on_gpu = gpus_per_replica(engine) > 0
    found: dict[str, tuple[Value, ...]] = {}
    if engine.enforce_eager and on_gpu:
        found["enforce_eager"] = (False,)  # on CPU false compiles code, which takes minutes at each start
    sequences = _LEAST_SEQS
    while sequences < completions:
        sequences *= 2
    found["max_num_seqs"] = tuple(most for most in (sequences, sequences // 2, sequences // 4) if most >= _LEAST_SEQS)
    if engine.kind is EngineKind.VLLM and on_gpu:
        found["api_server_count"] = (_API_SERVERS,)
    return found


def _is_possible(engine: EngineConfig, setting: Setting) -> bool:
    try:
        applied(engine, setting)
    except ConfigError:
        return False
    return True


def _parse(text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise UsageError(f"--lever {text!r}: expected NAME=VALUE,VALUE, such as max_num_seqs=64,128,256")
    return name.strip().removeprefix("engine."), tuple(yaml.safe_load(value) for value in values.split(","))


def _check(engine: EngineConfig, name: str, value: Value) -> None:
    """Raise `ConfigError` for a name or a value that no engine of this kind takes."""
    if name not in _MAY_CHANGE:
        raise UsageError(f"--lever {name!r}: it can be {', '.join(sorted(_MAY_CHANGE))}")
    if engine.kind is EngineKind.SGLANG and not _MAY_CHANGE[name].sglang:
        raise UsageError(f"--lever {name!r}: SGLang has no such lever; {_MAY_CHANGE[name].instead}")
    try:
        EngineConfig.model_validate(engine.model_dump() | {name: value})
    except ValidationError as error:
        if error.errors()[0]["loc"][:1] == (name,):
            raise UsageError(f"--lever {name}={_said(value)}: {error.errors()[0]['msg']}") from None


def _said(value: Value) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
