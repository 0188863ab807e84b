"""A worker's copy of the fleet. The owner assigns states and versions; each change is made here in the same order."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from engines.errors import ConfigError, EngineError
from engines.types import ReplicaInfo, ReplicaState
from gateway.config.schema import Config
from gateway.fleet.changes import Argument
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.watch.arrivals import Connect
from gateway.http.workers.messages import Changed, Joined, Versions

Examine = Callable[[Replica, EngineError], Awaitable[bool]]

_CHANGES: dict[str, Callable[..., None]] = {
    "hold": lambda replica, version, keeps_kv: replica.hold(version, keeps_kv=keeps_kv),
    "overwrite": Replica.overwrite,
    "lose_version": Replica.lose_version,
    "cut_off": lambda replica, is_on: replica.cut_off(is_on=is_on),
    "drop_calls": lambda replica, rollouts_alone: replica.drop_calls(rollouts_alone=rollouts_alone),
    "enter": lambda replica, state, reason: replica.enter(ReplicaState(state), reason),
}


class CopiedFleet(Fleet):
    """The copies of all replicas, with connections of this process to their engines. It watches nothing itself."""

    def __init__(self, config: Config, *, connect: Connect, examine: Examine) -> None:
        """`examine` has the owner look at a replica."""
        super().__init__(config, discover=_nobody, connect=connect)
        self._connect = connect
        self._examine = examine

    def join(self, joined: Joined) -> None:
        """Begin the copy of a replica."""
        info = joined.info
        with suppress(ConfigError):  # the owner has let it in
            self.models.join(info)
        replica = Replica(info, self._connect(info), frozen=joined.frozen)
        replica.weight_version, replica.cuts_off = joined.weight_version, joined.cuts_off
        replica.enter(joined.state, joined.reason)
        self._replicas[info.replica_id] = replica
        self._told()

    def leave(self, replica_id: str) -> None:
        """End the copy of a replica that is LOST."""
        if (replica := self._replicas.get(replica_id)) is not None:
            self._forget(replica)
            self._told()

    def change(self, changed: Changed) -> None:
        """Make a change of the owner's replica on its copy."""
        if (replica := self._replicas.get(changed.replica_id)) is not None:
            _make(replica, changed.change, changed.arguments)
            self._told()

    def note(self, versions: Versions) -> None:
        """Take over the fleet's versions."""
        self.version, self.update_to, self.rolling_to = versions.version, versions.update_to, versions.rolling_to

    def copy_of(self, replica_id: str) -> Replica:
        """The copy of a replica that is there."""
        return self._replicas[replica_id]

    async def examine(self, replica: Replica, error: EngineError) -> bool:
        return await self._examine(replica, error)

    async def close(self) -> None:
        """Close the connections to all engines."""
        for replica in self.replicas:
            await replica.engine.close()

    def _told(self) -> None:
        self._of_model.clear()
        self.notify()


def _make(replica: Replica, change: str, arguments: tuple[Argument, ...]) -> None:
    _CHANGES[change](replica, *arguments)


async def _nobody() -> list[ReplicaInfo]:
    return []
