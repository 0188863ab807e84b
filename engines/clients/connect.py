"""The choice of a client for an engine that we start."""

from engines.clients.sglang_engine import SglangEngine
from engines.clients.vllm_engine import VllmEngine
from engines.engine import Engine
from engines.types import EngineKind


def connect(kind: EngineKind, replica_id: str, url: str, *, has_tee: bool = False) -> Engine:
    """Return the client of one engine server."""
    client = SglangEngine if kind is EngineKind.SGLANG else VllmEngine
    return client(replica_id, url, has_tee=has_tee)
