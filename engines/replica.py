"""The Serve replica: owns one engine server and its GPUs, and says who it is. It carries no tokens."""

from dataclasses import replace

import ray
from ray import serve

from engines.config import EngineConfig
from engines.server import EngineServer
from engines.types import ReplicaInfo


class EngineReplica:
    """Deployed by `gateway.app`. Ready when its engine is; the engine ends with it, also on SIGKILL."""

    async def __init__(self, config: EngineConfig, group: str) -> None:
        context = serve.get_replica_context()
        rank = context.rank.rank
        self._server = EngineServer(config, replica_id=f"{group}-{rank}", group=group, index=rank)
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
