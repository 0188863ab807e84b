"""Needs of a configuration that one machine cannot meet. Others may: `serve deploy` runs elsewhere."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from engines.errors import ConfigError
from engines.model_folder import check_fetchable
from engines.process.engine_log import check_log_folder
from engines.process.launch import engine_command
from engines.types import EngineKind
from gateway.config.load import with_secrets
from gateway.config.placement import Nodes, Resource, check_placement
from gateway.config.schema import Config

_STARTED = (EngineKind.VLLM, EngineKind.SGLANG)


def lacks(
    config: Config,
    *,
    gpus: float | None = None,
    environ: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
) -> list[str]:
    """List what keeps the configuration from running on this machine alone; `gpus` replaces the count of its own.

    Keys are not read: a running Ray has variables of its own.
    """
    present = len(visible_gpus(environ, devices)) if gpus is None else gpus
    has = f"{present:g} GPUs" if present else "no GPU"
    misfits = [f"{error}. This machine has {has}" for error in misplaced(config, [("this machine", present)])]
    return [*models_missing(config), *misfits] or _engines(config)


def models_missing(config: Config) -> Iterator[str]:
    """Yield the models that are named nowhere or lie nowhere, and log folders that cannot be made."""
    for name, group in config.groups.items():
        section = f"engines.{name}" if config.engines else "engine"
        if group.kind in _STARTED and not group.model:
            yield f"{section}.model is missing: give a file with it, -c FILE, or a folder or Hugging Face id"
        elif group.kind in _STARTED and Path(group.model).is_absolute() and not Path(group.model).is_dir():
            yield f"{section}.model = {group.model!r}: this machine has no such folder"
        if group.kind is not EngineKind.EXTERNAL:
            yield from _error(check_log_folder, group, section)


def misplaced(config: Config, nodes: Nodes, resource: Resource = "GPU") -> list[str]:
    """List why the engines do not fit the GPUs or CPUs of these nodes."""
    return [] if config.serve.nodes_may_join else _error(check_placement, config.groups, nodes, resource)


def missing_keys(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the references to keys that lead to none, for a gateway with these variables."""
    return _error(with_secrets, config, environ)


def _engines(config: Config) -> list[str]:
    """List the engines that are not installed, do not take these settings or get no model, as a start reports it."""
    started = (group for group in config.groups.values() if group.kind is not EngineKind.EXTERNAL)
    command = partial(engine_command, port=1, index=0)
    elsewhere = config.serve.nodes_may_join  # such a node fetches the model itself
    errors = (_error(command, group) or ([] if elsewhere else _error(check_fetchable, group)) for group in started)
    return list(dict.fromkeys(text for found in errors for text in found))


def _error(check: Callable[..., object], *arguments: object) -> list[str]:
    """The error of a check, if it has one."""
    try:
        check(*arguments)
    except ConfigError as error:
        return [str(error)]
    return []


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """List the GPUs that this process may use, without CUDA: from CUDA_VISIBLE_DEVICES, else from device files."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]
