"""The vocabulary: plain facts that every package shares. Imports the standard library alone."""

from dataclasses import dataclass, field
from enum import StrEnum


class EngineKind(StrEnum):
    """Which server a replica runs."""

    VLLM = "vllm"
    SGLANG = "sglang"
    SIM = "sim"
    EXTERNAL = "external"  # somebody else runs it


class Dialect(StrEnum):
    """What an engine's server understands. Its client speaks vLLM's dialect upwards, whatever this is."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"  # OpenAI's routes and fields alone


class ReplicaState(StrEnum):
    """Where a replica is in its life. Only SERVING takes rollouts."""

    STARTING = "STARTING"
    SYNCING = "SYNCING"  # up, but its weights are not the fleet's
    SERVING = "SERVING"
    UPDATING = "UPDATING"
    DRAINING = "DRAINING"
    SUSPECT = "SUSPECT"  # missed a probe; may come back as what it was
    LOST = "LOST"


class PauseMode(StrEnum):
    """What a pause does to requests in flight (vLLM's words)."""

    ABORT = "abort"  # end them now, with the tokens they have
    WAIT = "wait"  # let them finish
    KEEP = "keep"  # freeze them; they go on after resume


class InFlight(StrEnum):
    """What a weight update does to rollouts in flight."""

    KEEP = "keep"  # freeze them while engines are overwritten; they go on, with the KV that older weights made
    RECOMPUTE = "recompute"  # the same, and the KV is made again by the new weights
    ABORT = "abort"  # end them at once; they go on from the tokens they have, on whichever replica, read by new weights
    DRAIN = "drain"  # let them finish first


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name, dtype ("bfloat16") and full shape of one weight tensor, as the checkpoint names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica says of itself when the gateway asks who is there.

    `incarnation` changes whenever the engine process is a new one, so a restarted engine is never mistaken for the
    one whose weights were known. `capabilities` are the routes that the engine serves. `tensors` is None where the
    checkpoint cannot be read (an update is then unchecked). `world_size` is 0 where the engine cannot take weights.
    `max_model_len` is None where it does not say.
    `has_tee` is True where it can tell digests of the weights it receives, and copy them into the weight store.
    `fetches` is True where it can fetch a version of the weights that is not on its machine.
    `reload_reason` says why an update is a reload by the engine itself, which takes longer; "" where it is loaded in
    place, and where the engine does not say.
    `gpus` are the UUIDs of its GPUs, where the driver tells them.
    `key` is the bearer key of `url`, which is a forwarder's then: the engine is on another node than the gateway.
    `started` is when its engine became ready, in seconds of the epoch; 0 where somebody else started it.
    `streams` is True where a reply costs the engine least in coarse chunks; any other is asked for whole replies.
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
    fetches: bool = False
    reload_reason: str = ""
    node: str = ""
    gpu_ids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    pid: int = 0
    started: float = 0.0
    log_path: str = ""
    key: str = field(default="", repr=False)
    tensors: tuple[TensorMeta, ...] | None = field(default=None, repr=False)

    @property
    def takes_weights(self) -> bool:
        """Whether it joins weight groups; one that does not holds the weights it came with."""
        return self.world_size > 0

    @property
    def is_far(self) -> bool:
        """Whether it is on another node of the cluster, so that it has the store's folder only where that is shared."""
        return bool(self.key)

    @property
    def speaks_vllm(self) -> bool:
        """Whether it takes vLLM's fields, such as token ids: by itself, or through a client that translates."""
        return self.dialect is not Dialect.OPENAI

    @property
    def loads_snapshots(self) -> bool:
        """Whether it can load all its weights from a folder."""
        return self.takes_weights and (self.dialect is Dialect.SGLANG or self.has("/collective_rpc"))

    def has(self, route: str) -> bool:
        """Whether the engine serves `route`. Engines that we start serve every route of their kind."""
        return self.kind is not EngineKind.EXTERNAL or route in self.capabilities
