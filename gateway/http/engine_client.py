"""The client of a replica's engine, by the replica's description and the configuration."""

from urllib.parse import urlsplit

import structlog

from engines.clients.connect import connect
from engines.clients.external import external_engine
from engines.engine import Engine, Peer
from engines.reading.link import Link
from engines.types import EngineKind, ReplicaInfo
from gateway.config.addresses import is_any, own_address, url_of
from gateway.config.schema import LOOPBACK_HOSTS, Config, GatewayConfig
from gateway.http.access import store_key

log = structlog.get_logger()


def engine_client(config: Config, info: ReplicaInfo) -> Engine:
    """Return the client of a replica's engine, with the way to the reader beside it."""
    engine = _client(config, info)
    engine.beside = Link(info.replica_id, info.reader, info.reader_key)
    return engine


def _client(config: Config, info: ReplicaInfo) -> Engine:
    """A replica reports only its forwarder's key; others are configured."""
    peer = _peer(config, info)
    if info.kind is EngineKind.EXTERNAL:
        group = config.groups.get(info.group)
        key = group.api_key if group else None
        return external_engine(info, key.get_secret_value() if key else "", peer)
    return connect(info.kind, info.replica_id, info.url, info.key, has_tee=info.has_tee, peer=peer)


def _peer(config: Config, info: ReplicaInfo) -> Peer | None:
    """Return the address from which a replica fetches weight versions that its machine lacks; None if it needs none."""
    url = config.weights.peer_url or (_as_reached_from(info.url, config.gateway) if info.is_far else None)
    if url is None and info.is_far:
        log.warning(
            "a replica on another node has weight versions only where weights.store is a folder that both share: bind "
            "gateway.host to an address that it reaches, or set weights.peer_url",
            replica=info.replica_id,
        )
    return Peer(url=url, key=store_key(config.gateway)) if url else None


def _as_reached_from(replica_url: str, gateway: GatewayConfig) -> str | None:
    """Return the gateway's URL as the machine of `replica_url` reaches it; None where it is not known beforehand."""
    if gateway.host in LOOPBACK_HOSTS or gateway.port == 0:
        return None
    replica = urlsplit(replica_url)
    assert replica.hostname is not None
    assert replica.port is not None
    ours = own_address(replica.hostname, replica.port) if is_any(gateway.host) else gateway.host
    return url_of(ours, gateway.port, tls=gateway.tls.is_on)
