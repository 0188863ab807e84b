"""Which replica takes a rollout: a pure choice over what is known of each replica."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt with its n samples: the unit that is placed. `tokens` estimates prompt plus completions.

    `min_version` is the least weight version that may make it, `max_staleness` how far that may be behind the newest.
    """

    request_id: str
    model: str
    n: int
    tokens: int
    min_version: int = 0
    max_staleness: int | None = None

    def least_version(self, newest: int) -> int:
        """The oldest weight version that will do when `newest` is the one that replicas are to hold."""
        return self.min_version if self.max_staleness is None else max(self.min_version, newest - self.max_staleness)


class ReplicaView(Protocol):
    """What the choice may see of a replica."""

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


def choose(rollout: Rollout, replicas: Iterable[View]) -> View | None:
    """The replica with the least tokens in flight, or None when each is full.

    Groups stay whole, since their samples share the prompt's KV. Ties go to the replica that was given least so far:
    a trainer's batch arrives when all loads are zero, and always taking the first would fill one replica first.
    """
    return min(
        (replica for replica in replicas if has_room(rollout, replica)),
        key=lambda replica: (replica.load_tokens, replica.placed),
        default=None,
    )


def has_room(rollout: Rollout, replica: ReplicaView) -> bool:
    """An idle replica takes any rollout, however large its n."""
    return replica.load_samples == 0 or replica.load_samples + rollout.n <= replica.max_samples
