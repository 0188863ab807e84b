"""The client of a replica's engine, by the replica's description and the configuration."""

from engines.clients.connect import connect
from engines.clients.external import external_engine
from engines.engine import Engine
from engines.reading.link import Link
from engines.types import EngineKind, ReplicaInfo
from gateway.config.schema import Config


def engine_client(config: Config, info: ReplicaInfo) -> Engine:
    """Return the client of a replica's engine, with the way to the reader beside it."""
    engine = _client(config, info)
    engine.beside = Link(info.replica_id, info.reader, info.reader_key)
    return engine


def _client(config: Config, info: ReplicaInfo) -> Engine:
    if info.kind is EngineKind.EXTERNAL:
        group = config.groups.get(info.group)
        key = group.api_key if group else None
        return external_engine(info, key.get_secret_value() if key else "")
    return connect(info.kind, info.replica_id, info.url, has_tee=info.has_tee)
