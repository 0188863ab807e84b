"""The gateway's own fleet, with a model in the place of each engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from engines.engine import Engine
from engines.types import ReplicaInfo
from engines.weight_label import WeightLabel
from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from tuning.simulate.engine import ModelledEngine
from tuning.simulate.speed import Speed

# Models do not fail, so nothing needs a watch; and the gateway's looks at engines would be most of the work.
_NEVER_S = 1e9
_JOIN_S = 1.0
# A gateway reads the pages of engines at work so often.
_LOOKS_APART_S = 10.0


@dataclass(eq=False)
class _JoiningEngine:
    """The part of `Engine` that the fleet asks when a replica joins and leaves."""

    replica_id: str
    model: ModelledEngine

    async def close(self) -> None:
        """Nothing is open."""

    async def weight_label(self, timeout_s: float) -> WeightLabel:
        return WeightLabel()

    async def metrics(self, timeout_s: float) -> str:
        """Return the part of vLLM's page that admission reads."""
        counts = self.model.counts
        return (
            f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{self.model.kv.capacity}"}} 1.0\n'
            f"vllm:num_requests_running {self.model.running}\n"
            f"vllm:iteration_tokens_total_count {self.model.steps}\n"
            f"vllm:prefix_cache_queries_total {counts.queried}\n"
            f"vllm:prefix_cache_hits_total {counts.found}\n"
        )


class ModelledFleet:
    """The replicas of some engine groups of a configuration, all of one model. `engines` has the models by replica."""

    def __init__(self, config: Config, speeds: Mapping[str, Speed]) -> None:
        watch = {"discover_interval_s": _NEVER_S, "probe_interval_s": _NEVER_S}
        self.config = config.model_copy(update={"fleet": config.fleet.model_copy(update=watch)})
        self.engines: dict[str, ModelledEngine] = {}
        self._infos: list[ReplicaInfo] = []
        for group, speed in speeds.items():
            for number in range(config.groups[group].num_replicas):
                info = _info(config, group, number)
                self._infos.append(info)
                self.engines[info.replica_id] = ModelledEngine(speed)

    @property
    def model(self) -> str:
        return self._infos[0].model

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        """Serve during the block."""
        fleet = Fleet(self.config, discover=self._discover, connect=self._connect)
        watch = asyncio.create_task(fleet.run(), name="fleet")
        try:
            if not await fleet.serves_within(self.model, _JOIN_S):
                await watch  # raises
            await fleet.metrics_pages()  # as a gateway does: it learns the engines' sizes from their pages
            looks = asyncio.create_task(_look(fleet), name="looks")
            try:
                yield fleet
            finally:
                looks.cancel()
                await asyncio.gather(looks, return_exceptions=True)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _discover(self) -> list[ReplicaInfo]:
        return self._infos

    def _connect(self, info: ReplicaInfo) -> Engine:
        return cast(Engine, _JoiningEngine(info.replica_id, self.engines[info.replica_id]))


async def _look(fleet: Fleet) -> None:
    """Read the pages of the engines that hold sessions, from which admission learns."""
    while True:
        await asyncio.sleep(_LOOKS_APART_S)
        await fleet.metrics_pages([replica for replica in fleet.alive if len(replica.residents)])


def _info(config: Config, group: str, number: int) -> ReplicaInfo:
    engine = config.groups[group]
    return ReplicaInfo(
        replica_id=f"{group}-{number:04}", incarnation="simulated", group=group, kind=engine.kind, url="",
        model=engine.served_name, world_size=0, max_model_len=engine.max_model_len, max_num_seqs=engine.max_num_seqs,
        engine_version="",
    )  # fmt: skip
