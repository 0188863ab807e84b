"""The levers that `tune` may change, the values that it tries, and a setting of all levers."""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml
from pydantic import ValidationError

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.levers import LEVERS
from engines.process.launch import gpus_per_replica
from engines.process.preflight import misfits
from engines.types import EngineKind

Value = int | float | str | bool | None

# Levers that change numbers or weights on which trainers rely, or that do not affect speed.
_NOT_SPEED = {"served_model_name", "dtype", "quantization", "load_format", "seed", "max_model_len", "kv_cache_dtype"}
_NOT_SPEED |= {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "logprobs_mode", "max_logprobs"}
_NOT_SPEED |= {"disable_log_stats", "data_parallel_size", "pipeline_parallel_size"}
_MAY_CHANGE = {lever.name: lever for lever in LEVERS if lever.name not in _NOT_SPEED}

# Few values, far apart: each costs a start of the engine.
_BATCHED_TOKENS = (2048, 8192, 32768)
_STREAM_INTERVALS = (32, 128)
_API_SERVERS = (1, 2, 4)
_MEMORY_SHARES = (0.9, 0.94)
_LEAST_SEQS = 8
# Larger values brought nothing in measurements (docs/benchmarks.md, Levers of an engine).
_ENOUGH = {"max_num_batched_tokens": 8192, "stream_interval": 32, "gpu_memory_utilization": 0.9}


@dataclass(frozen=True, slots=True)
class Lever:
    """A field of `EngineConfig` and the values that are tried, the start's own among them."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for every lever, in the levers' order."""

    values: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={_said(value)}" for name, value in self.values)

    def changed_to(self, name: str, value: Value) -> "Setting":
        return Setting(tuple((key, value if key == name else old) for key, old in self.values))

    def changes_from(self, start: "Setting") -> dict[str, Value]:
        """Return the levers whose value differs from `start`."""
        before = dict(start.values)
        return {name: value for name, value in self.values if value != before[name]}

    def changes_text(self, start: "Setting") -> str:
        changes = self.changes_from(start)
        return " ".join(f"{name}={_said(value)}" for name, value in changes.items()) or "start"

    def applied_to(self, engine: EngineConfig) -> EngineConfig:
        """Return the engine with these levers. Raise `ConfigError` for values that exclude each other."""
        try:
            changed = EngineConfig.model_validate(engine.model_dump() | dict(self.values))
        except ValidationError as error:
            raise ConfigError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
        if found := misfits(changed):
            raise ConfigError(f"{found[0].field} = {found[0].value!r}: {found[0].message}")
        return changed


def start_of(engine: EngineConfig, levers: Sequence[Lever]) -> Setting:
    """Return the engine's present setting."""
    return Setting(tuple((lever.name, getattr(engine, lever.name)) for lever in levers))


def expected_of(engine: EngineConfig, levers: Sequence[Lever], completions: int) -> Setting:
    """Return the setting that other measurements (docs/benchmarks.md) favour, among the values that are tried.

    Values that are enough stay, and so do levers that need a measurement.
    """
    enough = _ENOUGH | {"max_num_seqs": completions}
    expected = start_of(engine, levers)
    for lever in levers:
        own = getattr(engine, lever.name)
        if lever.name == "enforce_eager" and False in lever.values:
            expected = expected.changed_to(lever.name, False)
        elif lever.name in enough and own is not None and own < enough[lever.name]:
            expected = expected.changed_to(lever.name, _least(lever, enough[lever.name]))
    return expected


def _least(lever: Lever, enough: float) -> Value:
    """Return the least value that is enough, else the largest."""
    given = sorted(value for value in lever.values if isinstance(value, int | float))
    return next((value for value in given if value >= enough), given[-1])


def levers_of(engine: EngineConfig, given: Sequence[str], completions: int, num_gpus: int) -> list[Lever]:
    """Return the levers `given` as NAME=VALUE,VALUE, else the levers that matter for this engine and load.

    `completions` are in flight at a time. Raise `ConfigError` on a wrong name or value.
    """
    if engine.kind is EngineKind.EXTERNAL:
        raise ConfigError(
            "engine.kind = 'external': the gateway does not start that engine, and tune has to restart it"
        )
    values = dict(map(_parse, given)) if given else _usual(engine, completions, num_gpus)
    for name, tried in values.items():
        _check_name(engine, name)
        for value in tried:
            _check_value(engine, name, value, of_user=bool(given))
    return [Lever(name, tuple(dict.fromkeys((getattr(engine, name), *tried)))) for name, tried in values.items()]


def _usual(engine: EngineConfig, completions: int, num_gpus: int) -> dict[str, tuple[Value, ...]]:
    """Return levers and values, the most important first: a budget that runs out leaves the last levers untried.

    Values that are vLLM's defaults are not tried a second time.
    """
    is_vllm, on_gpu = engine.kind is EngineKind.VLLM, gpus_per_replica(engine) > 0
    found: dict[str, tuple[Value, ...]] = {"max_num_seqs": _sequences(completions)}
    if engine.enforce_eager and (on_gpu or engine.kind is EngineKind.SIM):
        found["enforce_eager"] = (False,)  # on CPU false compiles code, which takes minutes at each start
    if is_vllm and on_gpu:
        found["api_server_count"] = _API_SERVERS if engine.api_server_count else _API_SERVERS[1:]
    found["max_num_batched_tokens"] = _BATCHED_TOKENS
    if engine.kind is not EngineKind.SIM:
        found["stream_interval"] = _STREAM_INTERVALS
    if is_vllm and on_gpu and engine.kv_cache_memory_bytes is None and engine.gpus_per_replica is None:
        found["gpu_memory_utilization"] = _MEMORY_SHARES if engine.gpu_memory_utilization else _MEMORY_SHARES[1:]
    return found


def _sequences(completions: int) -> tuple[Value, ...]:
    """Return powers of two, up to the first that holds all completions at a time."""
    found, sequences = [], _LEAST_SEQS
    while sequences < completions:
        found.append(sequences)
        sequences *= 2
    return (*found[-3:], sequences)


def _parse(text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("engine.")
    if not equals or not values:
        raise ConfigError(f"--lever {text!r}: expected NAME=VALUE,VALUE, such as max_num_seqs=64,128,256")
    return name, tuple(yaml.safe_load(value) for value in values.split(","))


def _check_name(engine: EngineConfig, name: str) -> None:
    if name not in _MAY_CHANGE:
        raise ConfigError(f"--lever {name!r}: it can be {', '.join(sorted(_MAY_CHANGE))}")
    if engine.kind is EngineKind.SGLANG and not _MAY_CHANGE[name].sglang:
        raise ConfigError(f"--lever {name!r}: SGLang has no such lever; {_MAY_CHANGE[name].instead}")


def _check_value(engine: EngineConfig, name: str, value: Value, *, of_user: bool) -> None:
    """Raise `ConfigError` for a user's value of the wrong type. Values that exclude each other are found later."""
    try:
        EngineConfig.model_validate(engine.model_dump() | {name: value})
    except ValidationError as error:
        if of_user and error.errors()[0]["loc"][:1] == (name,):
            raise ConfigError(f"--lever {name}={_said(value)}: {error.errors()[0]['msg']}") from None


def _said(value: Value) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
