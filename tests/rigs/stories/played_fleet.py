"""Serving replicas without servers, for tests of placement and of the life of a rollout."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from engines.engine import Engine
from engines.errors import EngineError
from engines.types import EngineKind, ReplicaInfo, ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.watch.starts import Starts

DIED = "the engine died"


class PlayedFleet:
    """Stands where `Fleet` does. One replica of model "m" for each engine, with `places` and its place as version."""

    def __init__(self, engines: Sequence[Engine], places: int = 2) -> None:
        self.version = 0
        self.update_to = None
        self.replicas = [_replica(index, engine, places) for index, engine in enumerate(engines)]
        self.models = SimpleNamespace(policy="m")
        self.starts = Starts()

    def on_change(self, _: Any) -> None:
        return

    def serving(self, *_: Any) -> list[Replica]:
        return self.replicas

    def find(self, replica_id: str) -> Replica | None:
        return next((replica for replica in self.replicas if replica.replica_id == replica_id), None)

    def target_of(self, _: str) -> int:
        return 0

    def version_of(self, _: str) -> int:
        return self.version

    async def examine(self, _: Replica, error: EngineError) -> bool:
        """True if a probe would find that the engine's process is gone, as it does after `DIED`."""
        return DIED in str(error)


def _replica(index: int, engine: Engine, places: int) -> Replica:
    info = ReplicaInfo(
        replica_id=f"engine-{index}", incarnation=f"of engine-{index}", group="engine", kind=EngineKind.SIM, url="",
        model="m", world_size=1, max_model_len=128, max_num_seqs=places // 2, engine_version="1", streams=True,
    )  # fmt: skip
    replica = Replica(info, engine, frozen=False)
    replica.weight_version = index
    replica.enter(ReplicaState.SERVING, "played")
    return replica
