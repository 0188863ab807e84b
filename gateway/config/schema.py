"""The configuration: one strict pydantic tree. How files, environment and command line become one is in `load.py`."""

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    IPvAnyNetwork,
    SecretStr,
    field_validator,
    model_validator,
)

from engines.config import KEY_REFERENCES, EngineConfig, Secret, Section, is_reference
from engines.errors import ConfigError
from engines.types import InFlight
from gateway.config.models import Models

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# Serve knows an engine group by its name, beside these.
_OUR_DEPLOYMENTS = ("gateway", "control")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def _one_place(file: str | None) -> str | None:
    if file not in (None, "auto") and not Path(str(file)).is_absolute():
        raise ValueError(f"{file!r} is no absolute path, and the gateway runs in a folder of Ray's: give one")
    return file


AutoPlace = Annotated[str | None, AfterValidator(_one_place)]
"""An absolute path, nothing, or a place of the gateway's choice."""


def _sendable(key: SecretStr) -> SecretStr:
    """Refuse a key that every client sends, which is nothing, or that none can send."""
    text = key.get_secret_value()
    if text in KEY_REFERENCES:
        raise ValueError(f"nothing is named after {text}: give env:NAME or file:PATH")
    if not is_reference(key) and text.split() != [text]:
        raise ValueError("the key is empty or has white space: give a key, env:NAME or file:PATH")
    return key


Key = Annotated[Secret, AfterValidator(_sendable)]


class SessionsConfig(Section):
    """Bounds of what is kept of agents' sessions until they are acked; the ledger takes several times as much."""

    max_bytes: int = Field(1 << 30, gt=0)
    """Most bytes of each key. Beyond that, its sessions without open calls are forgotten, the least recently used
    first, then new calls are answered 429."""


class GatewayConfig(Section):
    """The data-path server."""

    host: str = "127.0.0.1"
    """Address that the gateway binds. Off loopback it needs keys."""
    port: int = Field(8100, ge=0, le=65535)
    """Port of the rollout URL; 0 takes a free one."""
    inference_keys: list[Key] = Field(default_factory=list)
    """Bearer keys for generation, as env:NAME or file:PATH."""
    admin_keys: list[Key] = Field(default_factory=list)
    """Bearer keys for weights, pause and other control; they may generate too."""
    trusted_networks: list[IPvAnyNetwork] = Field([ip_network("127.0.0.0/8"), ip_network("::1/128")])
    """Clients from these networks need no key: the way for TRL, which can send none, on another host."""
    max_body_bytes: int = Field(256 << 20, gt=0)
    """Largest request body."""
    queue_timeout_s: float = Field(600.0, gt=0)
    """Maximum wait of a rollout in the queue while no suitable replica makes a token."""
    generate_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for a replica's completions of one prompt; later than that no further attempt begins."""
    max_attempts: int = Field(3, ge=1)
    """Attempts in a row without a new token, on whichever replicas, before a rollout is reported failed."""
    replay_grace_s: float = Field(45.0, ge=0)
    """How long a whole batch of /v1/completions runs on whose connection broke, for an equal request to adopt it; TRL's
    client sends it again after at most 32 s. 0 ends it at once."""
    ledger: AutoPlace = "auto"
    """Folder that brings batches and sessions over a restart of the gateway, on a local disk; null keeps them
    in memory alone, auto is /var/tmp/rollout-gateway-USER-NAME/ledger."""
    sessions: SessionsConfig = SessionsConfig()


class FleetConfig(Section):
    """How replicas are watched."""

    discover_interval_s: float = Field(1.0, gt=0)
    """How often Serve is asked which replicas run."""
    probe_interval_s: float = Field(1.0, gt=0)
    """How often each engine's health is probed; an idle one with an open connection every third time."""
    probe_timeout_s: float = Field(5.0, gt=0)
    """Longest wait for one probe."""
    lost_after_s: float = Field(15.0, gt=0)
    """Silence after which a SUSPECT replica is LOST."""
    stalled_after_s: float = Field(10.0, gt=0)
    """If a replica makes no token for this long, its rollouts move to others, although it answers probes."""
    complete_within_s: float = Field(900.0, gt=0)
    """How long /health stays 503 while replicas are missing; after that those present are the fleet."""


class CanaryConfig(Section):
    """The check after an update: every replica scores one fixed sequence with its new weights before it serves."""

    enabled: bool = True
    """False to trust the replicas' own labels."""
    tokens: int = Field(64, ge=8, le=4096)
    """Length of the sequence. A longer one separates smaller updates from noise."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest wait for a replica's log-probs; an idle replica that takes longer has failed."""


class WeightsConfig(Section):
    """Bounds of a weight update, and when it holds."""

    canary: CanaryConfig = CanaryConfig()
    in_flight: InFlight = InFlight.KEEP
    """What happens to running rollouts during an update, if it names nothing else and generation is not paused: `keep`
    freezes them while engines are overwritten, `recompute`, or `abort`, freezes them and computes their KV again,
    `drain` waits for their end first."""

    store: AutoPlace = "auto"
    """Folder that keeps the served weight version, for replicas that lose theirs; null keeps none, auto is a folder in
    memory, /dev/shm/rollout-gateway-USER-NAME."""
    store_wait_s: float = Field(5.0, ge=0)
    """Longest wait of a transfer for the store's disk; a version that takes longer is not kept."""
    load_timeout_s: float = Field(600.0, gt=0)
    """Longest load of a version from the store, and longest write of one."""

    relay: Literal["auto", "always", "never"] = "auto"
    """Receiver of a trainer's tensors: one process that writes them into the store, from which all replicas load them,
    or (never) the engines themselves in one group, which a replica's death breaks. auto is the relay for more than one
    replica, and for vLLM beside SGLang, if there is a store and the relay has the engines' transport."""
    relay_device: str | None = Field(None, pattern=r"^cuda:\d+$")
    """GPU of the gateway's node on which the relay receives over NCCL, such as cuda:7. Not the trainer's own; a replica
    on the same GPU must leave 3 GB free. null receives over gloo, in host memory."""

    stage: Literal["auto", "never"] = "auto"
    """Place where engines receive tensors in a group with the trainer. auto is free memory of the engine's device, if
    all replicas are of one worker and have room for the checkpoint there: rollouts go on during the transfer, and a
    refused transfer has touched nothing. never, and auto without room, is the weights themselves."""

    init_timeout_s: float = Field(300.0, gt=0)
    """Rendezvous of the trainer and all engine workers, or the relay."""
    drain_timeout_s: float = Field(600.0, gt=0)
    """in_flight: drain; longest wait for rollouts in flight before an update."""
    transfer_timeout_s: float = Field(600.0, gt=0)
    """Longest transfer of one /update_weights call."""
    control_timeout_s: float = Field(60.0, gt=0)
    """Longest wait for a replica's answer to start, finish, pause, resume or a cache reset."""
    adapter_timeout_s: float = Field(120.0, gt=0)
    """Longest load of a LoRA adapter on one replica."""
    adapter_unload_timeout_s: float = Field(30.0, gt=0)
    """Longest wait for the rollouts that use a LoRA adapter before it is unloaded."""
    idle_timeout_s: float = Field(120.0, gt=0)
    """Silence of a trainer in an open update after which it is aborted."""

    @model_validator(mode="after")
    def _the_relay_has_a_store(self) -> "WeightsConfig":
        if self.relay == "always" and self.store is None:
            raise ValueError("relay = 'always' needs a weight store, which the replicas load from: set store, or auto")
        return self


class ServeConfig(Section):
    """Ray Serve's own HTTP port, which carries the control plane and no tokens. Fixed once Serve runs."""

    http_host: str = "127.0.0.1"
    """Address that Serve's proxy binds."""
    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the control plane."""
    proxy_location: Literal["HeadOnly", "EveryNode", "Disabled"] = "HeadOnly"
    """Nodes that answer for the control plane; Disabled leaves it without a port."""
    nodes_may_join: bool = False
    """True where an autoscaler or you will add nodes: replicas without a place then wait, and are not refused."""


class Config(Section):
    """Everything that `rollout-gateway up` needs."""

    name: str = Field("rollout-gateway", pattern=f"^{_NAME}$")
    """Name of the Serve application."""
    gateway: GatewayConfig = GatewayConfig()
    fleet: FleetConfig = FleetConfig()
    weights: WeightsConfig = WeightsConfig()
    serve: ServeConfig = ServeConfig()
    engine: EngineConfig = EngineConfig()
    """Defaults of all engine groups, and the one group where `engines` is empty."""
    engines: dict[str, EngineConfig] = Field(default_factory=dict)
    """Engine groups by name; each starts from `engine`."""

    @model_validator(mode="before")
    @classmethod
    def _groups_start_from_the_defaults(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or not isinstance(tree.get("engines"), dict):
            return tree
        defaults = tree.get("engine") or {}
        if not isinstance(defaults, dict):
            return tree
        groups = {
            name: {**defaults, **group} if isinstance(group, dict) else group for name, group in tree["engines"].items()
        }
        return {**tree, "engines": groups}

    @field_validator("engines")
    @classmethod
    def _groups_have_names_of_their_own(cls, engines: dict[str, EngineConfig]) -> dict[str, EngineConfig]:
        for name in engines:
            if name in _OUR_DEPLOYMENTS or not re.fullmatch(_NAME, name):
                raise ValueError(
                    f"{name!r} cannot name a group: take letters, digits and . _ -, and neither "
                    f"{' nor '.join(_OUR_DEPLOYMENTS)}, which name the gateway's own parts"
                )
        return engines

    @model_validator(mode="after")
    def _open_ports_need_keys(self) -> "Config":
        serve, gateway = self.serve, self.gateway
        if gateway.inference_keys and gateway.admin_keys:
            return self
        remedy = "set gateway.inference_keys and gateway.admin_keys, or bind 127.0.0.1"
        if gateway.host not in LOOPBACK_HOSTS:
            raise ValueError(f"gateway.host = {gateway.host!r} is reachable from other hosts: {remedy}")
        if serve.proxy_location != "Disabled" and serve.http_host not in LOOPBACK_HOSTS:
            raise ValueError(f"serve.http_host = {serve.http_host!r} shows the fleet's status to other hosts: {remedy}")
        return self

    @model_validator(mode="after")
    def _models_fit_together(self) -> "Config":
        try:
            Models(self.groups)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def groups(self) -> dict[str, EngineConfig]:
        """Engine groups by name."""
        return self.engines or {"engine": self.engine}
