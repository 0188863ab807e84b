"""Needs of a configuration that one machine cannot meet. Others may: `serve deploy` runs elsewhere."""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from engines.errors import ConfigError
from engines.types import EngineKind
from gateway.config.certificate import read_certificate
from gateway.config.load import with_secrets
from gateway.config.node_gpus import visible_gpus
from gateway.config.placement import ClusterGpus, check_placement
from gateway.config.schema import Config

_STARTED = (EngineKind.VLLM, EngineKind.SGLANG)


def lacks(
    config: Config,
    *,
    gpus: int | None = None,
    environ: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
) -> list[str]:
    """List what keeps the configuration from running on this machine alone; `gpus` replaces the count of its own."""
    present = len(visible_gpus(environ, devices)) if gpus is None else gpus
    found = [*_models(config), *_gpus(config, present), *_keys(config, environ), *_certificate(config)]
    return [*found, *_packages(config)]


def _models(config: Config) -> Iterator[str]:
    for name, group in config.groups.items():
        section = f"engines.{name}" if config.engines else "engine"
        if group.kind in _STARTED and not group.model:
            yield f"{section}.model is missing: a checkpoint folder or a Hugging Face id"
        elif group.kind in _STARTED and Path(group.model).is_absolute() and not Path(group.model).is_dir():
            yield f"{section}.model = {group.model!r}: this machine has no such folder"


def _gpus(config: Config, present: int) -> Iterator[str]:
    if config.serve.nodes_may_join:
        return
    nodes = [("this machine", float(present))]
    try:
        check_placement(config.groups, ClusterGpus(nodes=nodes, free=present))
    except ConfigError as error:
        yield f"{error}. This machine has {present} GPUs" if present else f"{error}. This machine has no GPU"


def _keys(config: Config, environ: Mapping[str, str]) -> Iterator[str]:
    try:
        with_secrets(config, environ)
    except ConfigError as error:
        yield str(error)


def _certificate(config: Config) -> Iterator[str]:
    try:
        if config.gateway.tls.is_on:
            read_certificate(config.gateway.tls)
    except ConfigError as error:
        yield str(error)


def _packages(config: Config) -> Iterator[str]:
    if config.gateway.otlp_endpoint and not find_spec("opentelemetry"):
        yield "gateway.otlp_endpoint needs OpenTelemetry: pip install 'rollout-gateway[otel]'"
