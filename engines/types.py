"""The vocabulary that all packages share. Imports the standard library alone."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

MARK = "ROLLOUT_GATEWAY_ENGINE"
"""Environment variable of all processes of an engine that we started."""


class EngineKind(StrEnum):
    """The server that a replica runs."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SIM = "sim"
    EXTERNAL = "external"  # started by someone else


class Dialect(StrEnum):
    """The dialect of an engine's server. Its client translates from vLLM's dialect."""

    VLLM = "vllm"
    SGLANG = "sglang"


OLDEST = {Dialect.VLLM: "0.32", Dialect.SGLANG: "0.5.23"}
"""Releases that say which weights they hold, and whose updates have the form that is sent here."""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def is_too_old(dialect: Dialect, version: str) -> bool:
    """Return True for a release before `OLDEST`. A build of the engine's source may have any number."""
    return "dev" not in version and _release(version) < _release(OLDEST[dialect])


class ReplicaState(StrEnum):
    """The life cycle of a replica. Only SERVING takes rollouts."""

    STARTING = "STARTING"
    SYNCING = "SYNCING"  # up, but without the fleet's weights
    SERVING = "SERVING"
    UPDATING = "UPDATING"
    DRAINING = "DRAINING"
    SUSPECT = "SUSPECT"  # missed a probe; may return to its earlier state
    LOST = "LOST"


class PauseMode(StrEnum):
    """The effect of a pause on requests in flight (vLLM's names)."""

    ABORT = "abort"  # end them now, with the tokens they have
    WAIT = "wait"  # let them finish
    KEEP = "keep"  # freeze them; they go on after resume


class InFlight(StrEnum):
    """The effect of a weight update on rollouts in flight."""

    KEEP = "keep"  # freeze them during the update; they resume with KV of the older weights
    RECOMPUTE = "recompute"  # the same, but the new weights recompute the KV
    DRAIN = "drain"  # let them finish first

    @classmethod
    def _missing_(cls, value: object) -> "InFlight | None":
        return cls.RECOMPUTE if value == "abort" else None  # that ended them, to read prompt and tokens again as well


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Checkpoint name, dtype ("bfloat16") and full shape of one weight tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Phase = tuple[str, float]
"""A phase of a start, such as "loading weights 3/8", and the time at which it began, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """A start of an engine. `phases` are in order; the last one has not ended. There are none once it serves."""

    replica_id: str
    group: str
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """A replica's description of itself.

    incarnation: id of the engine process; a restarted engine has another, so old weights are never assumed.
    capabilities: the engine's routes.
    tensors: None if the checkpoint cannot be read; updates are then unchecked.
    model_config: content of the checkpoint's config.json; "" where it cannot be read.
    tied: names of each tensor that the checkpoint stores more than once.
    world_size: ranks in a weight group; 0 if the engine takes no weights.
    max_model_len: None if the engine does not report it.
    has_tee: True if the engine digests received weights and can copy them into the weight store.
    has_plugin: True for an SGLang of others whose workers run our plugin.
    transport: the backend of weight transfer that it was started with; "" where it has to be asked.
    reload_reason: why an update is a slower reload by the engine; "" if it is loaded in place, or unknown.
    gpus: UUIDs of its GPUs, if the driver reports them.
    is_far: True on another node than the gateway's, where the store's folder may not be shared.
    reader: host and port of the reader beside it, and its key; "" before it is there.
    started: time at which the engine became ready, in seconds since the epoch; 0 for an external server.
    phases: those of its start, up to `started`; () for an external server.
    streams: True if coarse chunks cost the engine least; other engines are asked for whole replies.
    """

    replica_id: str
    incarnation: str
    group: str
    kind: EngineKind
    url: str
    model: str
    world_size: int
    max_model_len: int | None
    max_num_seqs: int
    engine_version: str
    capabilities: frozenset[str] = frozenset()
    dialect: Dialect = Dialect.VLLM
    streams: bool = False
    has_tee: bool = False
    has_plugin: bool = False
    transport: str = ""
    reload_reason: str = ""
    node: str = ""
    gpu_ids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    pid: int = 0
    started: float = 0.0
    phases: tuple[Phase, ...] = ()
    log_path: str = ""
    is_far: bool = False
    reader: str = ""
    reader_key: str = field(default="", repr=False)
    tensors: tuple[TensorMeta, ...] | None = field(default=None, repr=False)
    model_config: str = field(default="", repr=False)
    tied: tuple[tuple[str, ...], ...] = ()

    @property
    def takes_weights(self) -> bool:
        """True if it joins weight groups; otherwise its weights never change."""
        return self.world_size > 0

    @property
    def takes_packed(self) -> bool:
        """True if it joins a trainer's transfer group. SGLang does with our plugin."""
        return self.dialect is Dialect.VLLM or self.stages

    @property
    def stages(self) -> bool:
        """True if our code in it can receive weights beside its own; a vLLM that we did not start does not."""
        return self.has_tee or self.has_plugin

    @property
    def loads_snapshots(self) -> bool:
        """True if it can load all weights from a folder."""
        return self.takes_weights and (self.dialect is Dialect.SGLANG or self.has("/collective_rpc"))

    @property
    def loads_between_steps(self) -> bool:
        """True if a load may begin while the engine ends requests: our code in vLLM runs between two steps, and changes
        weights alone."""
        return self.dialect is Dialect.VLLM and self.has_tee

    def has(self, route: str) -> bool:
        """Return True if the engine serves `route`. Engines that we start serve every route of their kind."""
        return self.kind is not EngineKind.EXTERNAL or route in self.capabilities
