"""One engine server on loopback: start, warm-up, description and end. Independent of Ray."""

import asyncio
import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from secrets import randbelow
from typing import Any

import structlog

from engines.checkpoint.folder import known_tensors, read_config, served_in, tied_names
from engines.clients.sglang_engine import SglangEngine
from engines.clients.vllm_engine import VllmEngine
from engines.config import DEFAULT_LOG_DIR, EngineConfig
from engines.engine import Engine, Preparation
from engines.errors import ConfigError, DeadlineExceeded, EngineError, EngineFailed, EngineStartFailed
from engines.inside_vllm.plugin import STANDBY
from engines.model_folder import is_quantised, model_folder
from engines.process.diagnosis import diagnose, last_error
from engines.process.engine_log import Phases, check_log_folder, doing, forget_old_logs, measured_kv_memory
from engines.process.launch import VLLM_WORKER, engine_command, gpus_per_replica, transfer_backend
from engines.process.port import HeldPort
from engines.process.process import Command, EngineProcess
from engines.types import Dialect, EngineKind, ReplicaInfo, TensorMeta

log = structlog.get_logger()

_PROBE_TIMEOUT_S = 5.0
_PROBE_INTERVAL_S = 0.05
_GPUS_TIMEOUT_S = 10.0
# The only failure after which SGLang neither serves nor ends.
_NO_PORT = "error while attempting to bind on address"
_STOPPED_INTERVAL_S, _STOPPED_PROBES = 0.2, 5
"""So many times in a row is an engine found stopped. A clock would run on where the whole machine is suspended."""
_COARSE_INTERVAL = 16
_LEAST_UTILIZATION = 0.001
"""vLLM refuses to start where less of the GPU is free than this share. A standby is given the bytes of its KV cache."""
_SEEDS = 2**31
"""Engines take 32 bit seeds; half of them leaves room for engine.seed on top."""


class EngineServer:
    """One engine process and what is known of it; it can be started again. `index` sets the seed of its first start
    apart from its peers'; `hidden` names variables that it does not inherit. `sleeps` is True for a standby, until it
    is started again."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        replica_id: str,
        group: str,
        index: int,
        hidden: Sequence[str] = (),
        process: Callable[[Command, Path, float], EngineProcess] = EngineProcess,
    ) -> None:
        self._config = config
        self._hidden = hidden
        self._new_process = process
        self._replica_id = replica_id
        self._group = group
        self._index = index
        self._port: HeldPort | None = None
        self._process: EngineProcess | None = None
        self._engine: Engine | None = None
        self._is_dead = False
        self._described: ReplicaInfo | None = None
        self._transport = ""
        self.sleeps, self._is_lean = False, False
        self.phases = Phases("importing")
        self._kv_memory: int | None = None
        """Bytes of KV cache that vLLM has measured in an earlier start. Given, they spare it a capture of graphs."""

    async def start(self) -> ReplicaInfo:
        """Start, wait for health, warm up; or wake it where it sleeps. Raises `EngineStartFailed`, whose first line
        gives the reason, and `ConfigError` where nothing can be started. A start that fails or is cancelled leaves no
        process.

        A failure that may be transient is retried once here, since Serve is configured to give up at the first. So is
        one with the KV cache of an earlier start, which is then measured again.
        """
        if self.sleeps:
            self.sleeps = False
            try:
                return await self._woken()
            except (EngineError, DeadlineExceeded) as error:
                log.warning("a standby does not wake", replica=self._replica_id, reason=str(error))
        try:
            return await self._start_once()
        except EngineStartFailed as error:
            if self._is_lean or (not error.may_pass and self._kv_memory is None):
                raise
            self._kv_memory = None
            return await self._start_once()

    def standby(self) -> "EngineServer":
        """Return the server of a standby: it starts without memory for weights and KV cache, and is to `sleep` then.

        Raise `ConfigError` where the size of its KV cache is not known. Blocks for a moment.
        """
        if self._uses_gpus and not (self._kv_memory or self._config.kv_cache_memory_bytes):
            raise ConfigError(f"{self._section}.standby = 1: no log has the KV cache's size: set kv_cache_memory_bytes")
        other = EngineServer(
            self._config,
            replica_id=self._replica_id,
            group=self._group,
            index=randbelow(_SEEDS),
            hidden=self._hidden,
            process=self._new_process,
        )
        other._is_lean, other._kv_memory, other._uses_gpus = True, self._kv_memory, self._uses_gpus
        return other

    async def sleep(self) -> None:
        """Have the engine give up its weights, and on GPUs all memory that it can, until it is started again."""
        assert self._engine is not None
        limit_s = self._config.start_timeout_s
        await self._engine.abandon_weight_update(limit_s)  # its weights are of no version: the gateway loads them
        if self._uses_gpus:
            await self._engine.ask("POST", "/sleep?level=2", None, limit_s)
        self.sleeps, self._is_lean = True, False

    async def _woken(self) -> ReplicaInfo:
        assert self._engine is not None
        assert self._described is not None
        self.phases = Phases("waking")
        await self._engine.health(_PROBE_TIMEOUT_S)  # what ended the engine may have ended this one a moment before
        if self._uses_gpus:
            await self._engine.ask("POST", "/wake_up", None, self._config.start_timeout_s)
        return replace(self._described, started=time.time(), phases=self.phases.told())

    @cached_property  # with `engine.python` it takes a process of that Python
    def _uses_gpus(self) -> bool:
        return gpus_per_replica(self._config) > 0

    def _of_this_start(self) -> EngineConfig:
        """Return the configuration with what is known of the GPU's memory. A standby takes its share when it wakes."""
        known: dict[str, Any] = {} if self._kv_memory is None else {"kv_cache_memory_bytes": self._kv_memory}
        if self._is_lean and self._uses_gpus:
            known["gpu_memory_utilization"] = _LEAST_UTILIZATION
            known["load_format"] = "dummy"
            known["extra"] = {**self._config.extra, "enable_sleep_mode": True}
            known["env"] = {**self._config.env, STANDBY: "1"}
        return self._config.model_copy(update=known)

    async def check(self) -> None:
        """Raise if the engine does not serve."""
        assert self._process is not None
        assert self._engine is not None
        if (code := self._process.exit_code) is not None:
            why, _ = self._why(self._process, f"the engine ended with {code}")
            raise EngineError(f"{why}\n{_last_words(self._process)}", replica_id=self._replica_id)
        try:
            await self._engine.health(_PROBE_TIMEOUT_S)
        except EngineFailed as error:
            # vLLM's main process goes on for seconds after its core.
            self._is_dead = error.status == HTTPStatus.SERVICE_UNAVAILABLE
            raise

    async def ended(self) -> None:
        """Return when the engine that was started has ended, or has told a check that it will not serve again.

        One that SIGSTOP holds is killed: it would hold its GPUs and make nothing, for how long nobody knows.
        """
        assert self._process is not None
        stopped = 0
        while not self._is_dead and not await self._process.ends_within(_STOPPED_INTERVAL_S):
            stopped = stopped + 1 if self._process.is_stopped else 0
            if stopped >= _STOPPED_PROBES:
                log.warning("the engine is stopped (SIGSTOP), and is killed", replica=self._replica_id)
                self._process.kill()

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        if self._process is not None:
            await self._process.stop()
        if self._port is not None:
            self._port.release()

    async def _start_once(self) -> ReplicaInfo:
        await self.stop()
        self._is_dead, self.phases = False, Phases("importing")
        try:
            return await self._started()
        except BaseException:  # also a cancelled start: its engine would keep the GPU
            await self.stop()
            raise

    async def _started(self) -> ReplicaInfo:
        self._port = HeldPort()
        config, port = self._of_this_start(), self._port.number
        await asyncio.to_thread(check_log_folder, config, self._section)
        log_path = config.log_folder / f"{self._replica_id}-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log"
        if config.log_dir == DEFAULT_LOG_DIR:
            await asyncio.to_thread(forget_old_logs, config.log_folder)
        # An engine that is started again shall not draw the samples of its predecessor, nor those of a peer.
        index, self._index = self._index % _SEEDS, randbelow(_SEEDS)
        command = await asyncio.to_thread(engine_command, config, port=port, index=index)
        has_tee = config.kind is EngineKind.SIM or VLLM_WORKER in command.argv
        command, self._transport = replace(command, hidden=self._hidden), transfer_backend(command)
        self._process = process = self._new_process(command, log_path, config.stop_timeout_s)
        client = SglangEngine if config.kind is EngineKind.SGLANG else VllmEngine
        self._engine = engine = client(self._replica_id, f"http://127.0.0.1:{port}", has_tee=has_tee)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                if not await process.start_warm():
                    process.start()
                await self._healthy(process, engine)
                # The first request of a new engine takes seconds; rollouts should not pay for it.
                self.phases.enter("warming up")
                warm_up = {"model": config.served_name, "prompt": [3, 4, 5, 6], "max_tokens": 2, "temperature": 0}
                await engine.generate("/v1/completions", warm_up, config.start_timeout_s)
                self.phases.enter("preparing updates")
                info = await self._describe(process, engine)
                # Else another server has answered, which took the port between the draw and the bind.
                self._check_own(process)
                self._described = info
                self._kv_memory = measured_kv_memory(process.log_tail()) or self._kv_memory
                return info
        except TimeoutError:
            why, may_pass = self._why_late(process), False
        except (EngineError, DeadlineExceeded) as error:
            why, may_pass = self._why(process, str(error))
        except (LookupError, TypeError, OSError) as error:
            why, may_pass = f"the engine describes itself in a way that is not understood: {error!r}", False
        raise EngineStartFailed(f"{why}\n{_last_words(process)}", replica_id=self._replica_id, may_pass=may_pass)

    async def _healthy(self, process: EngineProcess, engine: Engine) -> None:
        while True:
            self.phases.enter(doing(process.log_tail()))
            self._check_own(process)
            try:
                return await engine.health(_PROBE_TIMEOUT_S)
            except (EngineError, DeadlineExceeded):
                await asyncio.sleep(_PROBE_INTERVAL_S)

    def _check_own(self, process: EngineProcess) -> None:
        """Raise where the engine has ended, or will never serve, whatever answers on its port."""
        if (code := process.exit_code) is not None:
            raise EngineError(f"the engine ended with {code} before it was ready")
        if self._config.kind is EngineKind.SGLANG and _NO_PORT in process.log_tail():
            raise EngineError("the engine's port is taken")

    def _why(self, process: EngineProcess, reason: str) -> tuple[str, bool]:
        """Return one line on the failure, and True if a retry may succeed, as after any unknown failure."""
        log = process.log_tail()
        if found := diagnose(self._config.kind, log, process.exit_code, self._section):
            return found
        words = last_error(log)
        return reason + (f' for an unknown reason; its last error: "{words}"' if words else ""), True

    def _why_late(self, process: EngineProcess) -> str:
        limit, key = self._config.start_timeout_s, f"{self._section}.start_timeout_s"
        stage = doing(process.log_tail())
        return f"was not ready within {limit:g} s; last stage: {stage}; raise {key} if it only needs more time"

    @property
    def _section(self) -> str:
        """The configuration key of this group."""
        return "engine" if self._group == "engine" else f"engines.{self._group}"

    async def _describe(self, process: EngineProcess, engine: Engine) -> ReplicaInfo:
        # The start as a whole has this limit: a slow machine may need any part of it for any answer.
        limit_s = self._config.start_timeout_s
        models, version, world = await asyncio.gather(
            *(engine.ask("GET", path, None, limit_s) for path in ("/v1/models", "/version", "/get_world_size"))
        )
        visible = self._config.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        before = self._described
        if before is not None and before.engine_version == version["version"]:
            # vLLM takes a second to list its routes, and the driver to list GPUs.
            capabilities, gpus = before.capabilities, before.gpus
        else:
            capabilities = frozenset((await engine.ask("GET", "/openapi.json", None, limit_s))["paths"])
            gpus = await asyncio.to_thread(gpus_of, "" if self._config.device == "cpu" else visible)
        tensors = expected_tensors(self._config)
        config, tied = await asyncio.to_thread(_names_of, self._config) if tensors else ("", ())
        updates = Preparation()
        if not self._config.frozen:
            updates = await engine.prepare_updates(tensors or (), config, tied, limit_s)
        return ReplicaInfo(
            replica_id=self._replica_id,
            incarnation=f"{process.pid}@{time.time_ns()}",
            group=self._group,
            kind=self._config.kind,
            url=engine.url,
            model=models["data"][0]["id"],
            world_size=world["world_size"],
            max_model_len=models["data"][0]["max_model_len"],
            max_num_seqs=self._config.max_num_seqs,
            engine_version=version["version"],
            capabilities=capabilities,
            gpu_ids=tuple(int(gpu) for gpu in (visible or "").split(",") if gpu.isdigit()),
            gpus=gpus,
            dialect=Dialect.SGLANG if self._config.kind is EngineKind.SGLANG else Dialect.VLLM,
            streams=streams_coarsely(self._config),
            has_tee=updates.has_tee,
            transport=self._transport,
            reload_reason=updates.obstacle,
            pid=process.engine_pid,
            started=time.time(),
            phases=self.phases.told(),
            log_path=str(process.log_path),
            tensors=tensors,
            model_config=config,
            tied=tied,
        )


def _last_words(process: EngineProcess) -> str:
    # Indented: Ray cuts a message before a traceback at the left edge.
    return f"    log {process.log_path} ends with:\n{textwrap.indent(process.last_words(), '    | ', lambda _: True)}"


def gpus_of(visible: str | None) -> tuple[str, ...]:
    """Return UUIDs of the GPUs in CUDA_VISIBLE_DEVICES = `visible`, of all if None; () without an NVIDIA driver."""
    if visible == "":
        return ()
    chosen = [] if visible is None else ["-i", visible]
    asking = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", *chosen]
    try:
        listed = subprocess.run(asking, capture_output=True, text=True, timeout=_GPUS_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line for line in listed.split() if line.startswith("GPU-"))


def streams_coarsely(config: EngineConfig) -> bool:
    """Return True if coarse streaming costs the engine least.

    Short chunks cost throughput, and vLLM cannot stream routed experts. SGLang detokenizes a whole reply in parts of 50
    tokens anyway.
    """
    return config.stream_interval >= _COARSE_INTERVAL and not config.extra.get("enable_return_routed_experts")


def expected_tensors(config: EngineConfig) -> tuple[TensorMeta, ...] | None:
    """Return the tensors of a full weight update; None if unknown."""
    if config.kind is EngineKind.SIM:
        return tuple(
            TensorMeta(name=name, dtype="float32", shape=tuple(shape)) for name, shape in config.sim.tensors.items()
        )
    folder = model_folder(config)
    # A quantised checkpoint has other tensors than the trainer. An engine that quantises a plain one as it loads it
    # takes the trainer's tensors, and quantises them in each update.
    if folder is None or is_quantised(folder):
        return None
    tensors = known_tensors(folder)
    return tensors and served_in(config.dtype, tensors)


def _names_of(config: EngineConfig) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return the checkpoint's config.json and its tied names."""
    folder = model_folder(config)
    return ("", ()) if folder is None else (read_config(folder), tied_names(folder))
