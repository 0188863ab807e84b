"""Picks the replica that takes a rollout: a pure choice over the loads and versions of the replicas."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeVar

from msgspec import Struct, field

from gateway.fleet.adapters import Adapter
from gateway.fleet.placement.attempts import Attempts
from gateway.fleet.replica import Replica

# `max_samples` is twice what an engine runs at once: a quarter of it is half of its batch.
_LIGHT_SHARE = 0.25
_OVERLOADED_SHARES = 1.5
_REMEMBERED = 100_000
_NEWEST_SHARE = 0.5
_rank = attrgetter("rank")

K = TypeVar("K")
V = TypeVar("V")


class Rollout(Struct, frozen=True, kw_only=True, eq=False):
    """One prompt with its n samples: the unit of placement. `tokens` estimates prompt plus completions.

    `min_version` is the oldest weight version allowed, `max_staleness` its largest distance from the newest.
    `session` names the conversation that this is a turn of, if it is one.
    `adapter` is the LoRA adapter that makes its tokens; None for the model alone.
    `goes_on` is True for the rest of a rollout that has begun.
    `request` is the id of the client's request, whose rollouts take turns with other requests.
    `needs_route` is a route that its replica has to serve, or "".
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
    needs_route: str = ""
    prompt_tokens: int = 0
    request: str = ""
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


class Recent(OrderedDict[K, V]):
    """The values of the `limit` keys that were noted last."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        super().__init__()
        self._limit = limit

    def note(self, key: K, value: V) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class Lengths:
    """The mean number of tokens of a prompt's samples, by model, so that a batch can begin with the longest: a trainer
    sends the same prompts epoch after epoch."""

    def __init__(self) -> None:
        self._lengths = Recent[tuple[str, int], float]()

    def of(self, model: str, prompt: str | list[int]) -> tuple[int, float | None]:
        """Return a hash of the prompt, and the expected tokens of a sample; None for a prompt of which nothing was
        delivered. 0 is the hash of none."""
        try:
            key = hash(tuple(prompt) if isinstance(prompt, list) else prompt) if prompt else 0
        except TypeError:  # an engine will refuse it
            return 0, None
        return key, self._lengths.get((model, key))

    def delivered(self, model: str, key: int, tokens: float) -> None:
        """Note the mean length of samples; what was known counts for a half."""
        if key:
            before = self._lengths.get((model, key), tokens)
            self._lengths.note((model, key), before + _NEWEST_SHARE * (tokens - before))


def choose(rollout: Rollout, replicas: Sequence[Replica], home: Replica | None = None) -> Replica | None:
    """The replica with the fewest tokens in flight, or None if all are full.

    Groups stay whole, since their samples share the prompt's KV. Ties go to the replica with the fewest placements: a
    trainer's batch arrives when all loads are zero, and always taking the first would fill one replica first.
    `home` is the replica that holds the prefix of the rollout's session; it is taken unless it is overloaded.
    """
    if home is not None and _is_kept(home, rollout, replicas):
        return home
    # A look at each is most of a placement's time on a large fleet, so there is one.
    while replicas:
        least = min(replicas, key=_rank)
        if has_room(rollout, least):
            return least
        replicas = [one for one in replicas if has_room(rollout, one)]  # the fewest tokens may be of many short samples
    return None


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


def has_room(rollout: Rollout, replica: Replica) -> bool:
    """An idle replica takes any rollout, however large its n. Rests are spread, as each is a prompt to read at once."""
    if replica.load_samples == 0:
        return True
    return replica.has_place(rollout) and (not rollout.moves or replica.prompts.may_add(replica.load_samples))
