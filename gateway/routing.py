"""Which replica takes a rollout: a pure choice over what is known of each replica."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt with its n samples: the unit that is placed. `tokens` estimates prompt plus completions."""

    request_id: str
    model: str
    n: int
    tokens: int


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


View = TypeVar("View", bound=ReplicaView)


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
