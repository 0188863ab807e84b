"""Picks the replica that takes a rollout: a pure choice over the loads and versions of the replicas."""

import math
from collections.abc import Sequence

from msgspec import Struct, field

from engines.types import ReplicaInfo
from gateway.fleet.adapters import Adapter
from gateway.fleet.placement.attempts import Attempts
from gateway.fleet.replica import Replica

# `max_samples` is twice what an engine runs at once: a quarter of it is half of its batch.
_LIGHT_SHARE = 0.25
_OVERLOADED_SHARES = 1.5
_HOME = "home of its session"


class Rollout(Struct, frozen=True, kw_only=True, eq=False):
    """One prompt with its n samples: the unit of placement. `tokens` estimates prompt plus completions.

    `min_version` is the oldest weight version allowed, `max_staleness` its largest distance from the newest.
    `session` names the conversation that this is a turn of, if it is one.
    `adapter` is the LoRA adapter that makes its tokens; None for the model alone.
    `goes_on` is True for the rest of a rollout that has begun.
    `request` is the id of the client's request, whose rollouts take turns with other requests.
    `owner` names the key that submitted it; "" for rollouts of other routes.
    `needs_ids` is True if the client asks for token ids or log-probs of the prompt, which plain OpenAI servers lack.
    `needs_route` is a route that its replica has to serve, or "".
    `priority` orders rollouts that wait; lower is earlier.
    `expected` is the length of a sample in tokens by the client's estimate or the prompt's last samples, None where
    neither is known; `prompt_key` is the prompt's hash, under which its length is remembered, 0 for none.
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
    needs_ids: bool = False
    needs_route: str = ""
    prompt_tokens: int = 0
    request: str = ""
    owner: str = ""
    priority: int = 0
    expected: float | None = None
    prompt_key: int = 0
    attempts: Attempts = field(default_factory=Attempts)

    @property
    def moves(self) -> bool:
        """True for a rest, and after a failed attempt: its engine reads it all again, and it is placed first."""
        return self.goes_on or bool(self.attempts.avoid)

    @property
    def rank(self) -> float:
        """Place by length, lower is earlier: the longest first, and before it those that may be longer yet."""
        return -math.inf if self.expected is None else -self.expected

    def least_version(self, newest: int) -> int:
        """The oldest weight version allowed; `newest` is the target version during an update."""
        return self.min_version if self.max_staleness is None else max(self.min_version, newest - self.max_staleness)


def is_capable(rollout: Rollout, info: ReplicaInfo) -> bool:
    """True if the replica's server can do what the request asks."""
    return (info.speaks_vllm or not rollout.needs_ids) and (
        not rollout.needs_route or rollout.needs_route in info.capabilities
    )


def fresh_enough(rollout: Rollout, replicas: Sequence[Replica], newest: int) -> Sequence[Replica]:
    """Replicas whose weights are as new as the rollout demands. `newest` is the target version during an update."""
    least = rollout.least_version(newest)
    if not least:
        return replicas
    return [replica for replica in replicas if (replica.weight_version or 0) >= least]


def choose(rollout: Rollout, replicas: Sequence[Replica], home: Replica | None = None) -> tuple[Replica, str] | None:
    """The replica with the fewest tokens in flight, and the reason for it, or None if all are full.

    Groups stay whole, since their samples share the prompt's KV. Ties go to the replica with the fewest placements: a
    trainer's batch arrives when all loads are zero, and always taking the first would fill one replica first.
    `home` is the replica that holds the prefix of the rollout's session; it is taken unless it is overloaded.
    """
    if home is not None and _is_kept(home, rollout, replicas):
        return home, _HOME
    chosen = _least_loaded(rollout, replicas)
    return None if chosen is None else (chosen, _why(chosen, replicas, home))


def _is_kept(home: Replica, rollout: Rollout, replicas: Sequence[Replica]) -> bool:
    """True if a session's next turn goes to its home."""
    if home not in replicas or not has_room(rollout, home):
        return False
    # A few samples more cost a decoding engine next to nothing, so one with little to do is never overloaded.
    return home.load_samples < _LIGHT_SHARE * home.max_samples or not _is_overloaded(home, rollout, replicas)


def _is_overloaded(home: Replica, rollout: Rollout, replicas: Sequence[Replica]) -> bool:
    """True if a session's next turn is better read again elsewhere than queued where its prefix is: its home has
    clearly more than its share of the tokens in flight on replicas with room for the turn."""
    n = rollout.n
    loads = [
        one.load_tokens for one in replicas if not one.load_samples or one.load_samples + n <= one.max_samples
    ]  # `has_room`
    return home.load_tokens > _OVERLOADED_SHARES * (sum(loads) / len(loads))


def _least_loaded(rollout: Rollout, replicas: Sequence[Replica]) -> Replica | None:
    """The choice among replicas. A look at each is most of a placement's time on a large fleet, so there is one."""
    if not replicas:
        return None
    ranks = [one.rank for one in replicas]
    least = replicas[ranks.index(min(ranks))]
    if has_room(rollout, least):
        return least
    # The fewest tokens may be those of many short samples.
    return _least_loaded(rollout, [one for one in replicas if has_room(rollout, one)])


def _why(chosen: Replica, replicas: Sequence[Replica], home: Replica | None) -> str:
    """The reason for which `choose` took a replica."""
    if chosen is home:
        return _HOME
    if not any(one.load_samples < one.max_samples for one in replicas if one is not chosen):
        return "the only one with room"
    if home is not None:
        return "fewest tokens: its session's home is overloaded or has no room"
    return "fewest tokens"


def has_room(rollout: Rollout, replica: Replica) -> bool:
    """An idle replica takes any rollout, however large its n. Rests are spread, as each is a prompt to read at once."""
    if replica.load_samples == 0:
        return True
    return replica.has_place(rollout) and (not rollout.moves or replica.prompts.may_add)
