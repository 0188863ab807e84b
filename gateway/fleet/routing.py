"""Which replica takes a rollout: a pure choice over what is known of each replica."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gateway.fleet.adapters import Adapter

# `max_samples` is twice what an engine runs at once: a quarter of it is half of its batch.
_LIGHT_SHARE = 0.25
_OVERLOADED_SHARES = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt with its n samples: the unit that is placed. `tokens` estimates prompt plus completions.

    `min_version` is the least weight version that may make it, `max_staleness` how far that may be behind the newest.
    `session` names the conversation that it is a turn of, if it is one.
    `adapter` is that of the model's LoRA adapters which makes its tokens; None for the model alone.
    `goes_on` for the rest of one that has begun, which is placed before those that have not.
    """

    request_id: str
    model: str
    n: int
    tokens: int
    adapter: Adapter | None = None
    min_version: int = 0
    max_staleness: int | None = None
    session: str = ""
    goes_on: bool = False

    def least_version(self, newest: int) -> int:
        """The oldest weight version that will do when `newest` is the one that replicas are to hold."""
        return self.min_version if self.max_staleness is None else max(self.min_version, newest - self.max_staleness)


class ReplicaView(Protocol):
    """What the choice may see of a replica."""

    @property
    def replica_id(self) -> str: ...
    @property
    def load_tokens(self) -> int: ...
    @property
    def load_samples(self) -> int: ...
    @property
    def max_samples(self) -> int: ...
    @property
    def placed(self) -> int: ...
    @property
    def weight_version(self) -> int | None: ...


View = TypeVar("View", bound=ReplicaView)


def fresh_enough(rollout: Rollout, replicas: Iterable[View], newest: int) -> list[View]:
    """Those whose weights are as new as the rollout demands. `newest` is the version that all are to hold."""
    least = rollout.least_version(newest)
    return [replica for replica in replicas if (replica.weight_version or 0) >= least]


def choose(rollout: Rollout, replicas: Iterable[View], home: str | None = None) -> View | None:
    """The replica with the least tokens in flight, or None when each is full.

    Groups stay whole, since their samples share the prompt's KV. Ties go to the replica that was given least so far:
    a trainer's batch arrives when all loads are zero, and always taking the first would fill one replica first.
    `home` is the replica that holds the prefix of the rollout's session: it is taken unless it is overloaded.
    """
    able = [replica for replica in replicas if has_room(rollout, replica)]
    for replica in able:
        if replica.replica_id == home and not is_overloaded(replica, able):
            return replica
    return min(able, key=lambda replica: (replica.load_tokens, replica.placed), default=None)


def has_room(rollout: Rollout, replica: ReplicaView) -> bool:
    """An idle replica takes any rollout, however large its n."""
    return replica.load_samples == 0 or replica.load_samples + rollout.n <= replica.max_samples


def is_overloaded(home: ReplicaView, able: Sequence[ReplicaView]) -> bool:
    """Whether a session's next turn is better read anew elsewhere than queued where its prefix is.

    A few samples beside it cost a decoding engine next to nothing, so a replica with little to do is never overloaded,
    however idle the others are. Beyond that it is when it has clearly more than its share of the tokens in flight.
    """
    if home.load_samples < _LIGHT_SHARE * home.max_samples:
        return False
    share = sum(replica.load_tokens for replica in able) / len(able)
    return home.load_tokens > _OVERLOADED_SHARES * share
