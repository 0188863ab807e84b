"""The Serve replica: owns one engine server and its GPUs, and says who it is. It carries no tokens."""

import zlib
from dataclasses import replace

import ray
from ray import serve

from engines.config import EngineConfig
from engines.external import ExternalServer
from engines.server import EngineServer
from engines.types import EngineKind, ReplicaInfo

# Engines take 32 bit seeds; half of them leaves room for engine.seed on top.
_SEEDS = 2**31


class EngineReplica:
    """Deployed by `gateway.app`. Ready when its engine is; the engine ends with it, also on SIGKILL."""

    async def __init__(self, config: EngineConfig, group: str) -> None:  # type: ignore[misc]  # Serve awaits it
        # Serve's tag of this replica, not its rank: Serve deals ranks out again, and two replicas with one name or
        # one seed would be taken for the same and would draw the same samples.
        tag = serve.get_replica_context().replica_tag
        index = zlib.crc32(tag.encode()) % _SEEDS
        self._server = _server(config, f"{group}-{tag}", group, index)
        node = ray.get_runtime_context().get_node_id()
        self._info = replace(await self._server.start(), node=node)

    def incarnation(self) -> str:
        """Which start of which replica this is: cheap to ask for, and enough to see a change."""
        return self._info.incarnation

    def describe(self) -> ReplicaInfo:
        return self._info

    async def check_health(self) -> None:
        """Serve starts the replica anew when this raises."""
        await self._server.check()

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()


def _server(config: EngineConfig, replica_id: str, group: str, index: int) -> EngineServer | ExternalServer:
    if config.kind is EngineKind.EXTERNAL:
        return ExternalServer(config, replica_id=replica_id, group=group)
    return EngineServer(config, replica_id=replica_id, group=group, index=index)
