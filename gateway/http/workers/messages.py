"""The messages between the owner and a worker. `docs/design/workers.md` has their order."""

import msgspec

from engines.types import ReplicaInfo, ReplicaState
from gateway.fleet.changes import Argument
from gateway.fleet.metrics import Count
from gateway.http.own_requests import AbortKind


class Message(msgspec.Struct, array_like=True, gc=False, tag_field="type"):
    """A message. `turn` numbers a rollout's run in its worker, `call` a question."""


class Failure(msgspec.Struct, array_like=True, gc=False):
    """An error: the name of its class, its message and fields."""

    kind: str
    text: str
    param: str | None = None
    replica_id: str = ""
    status: int = 0
    retry_after_s: float | None = None


class Asked(msgspec.Struct, array_like=True, gc=False):
    """A rollout as the owner places it; the fields are those of `Rollout`."""

    request_id: str
    model: str
    n: int
    tokens: int
    min_version: int
    max_staleness: int | None
    session: str
    goes_on: bool
    needs_ids: bool
    needs_route: str
    prompt_tokens: int
    request: str
    owner: str
    priority: int
    expected: float | None
    prompt_key: int


# From a worker


class Ready(Message):
    """The worker serves clients from now on."""


class Place(Message):
    """Place a rollout, not on the replicas in `avoid` if others can take it. `asked` comes with its first attempt."""

    turn: int
    avoid: tuple[str, ...]
    asked: Asked | None
    traceparent: str


class Left(Message):
    """An attempt has ended: it gave a result, or failed."""

    turn: int
    failure: Failure | None


class Judge(Message):
    """Draw the conclusions from the attempt that has failed; answered by `Judged`."""

    turn: int
    end: str
    failure: Failure


class Over(Message):
    """No further attempt; one that waits or runs is given up."""

    turn: int


class Delivered(Message):
    """A rollout was delivered whole."""

    model: str
    session: str
    prompt_key: int
    n: int
    prompt_tokens: int
    completion_tokens: int


class Progress(Message):
    """Replicas that have made tokens."""

    replicas: tuple[str, ...]


class Examine(Message):
    """Look at a replica that gave no answer; answered by `Judged`."""

    turn: int
    replica_id: str
    failure: Failure


class Batches(Message):
    """Identities of batches that run, or that a replay may adopt, in a worker; the owner tells the others."""

    worker: int
    begun: tuple[bytes, ...]
    ended: tuple[bytes, ...]


class Done(Message):
    """All messages up to `Sync` or `Abort` of this number are dealt with."""

    call: int


class Report(Message):
    """The state of a worker, once a second: how many connections it has `taken` since its start, how many are open, and
    the values of its metrics by name and labels."""

    taken: int
    connections: int
    counts: list[Count]


# From the owner


class Hello(Message):
    """The first message: the configuration as JSON, the worker's number, and the folder of the doors between the
    processes."""

    config: bytes
    index: int
    folder: str


class Joined(Message):
    """A replica, as it is now."""

    info: ReplicaInfo
    frozen: bool
    state: ReplicaState
    reason: str
    weight_version: int | None
    cuts_off: bool


class Gone(Message):
    """A replica is LOST."""

    replica_id: str


class Changed(Message):
    """A change of a replica: a method of `Replica`, with its arguments."""

    replica_id: str
    change: str
    arguments: tuple[Argument, ...]


class Versions(Message):
    """The fleet's version, that of an open update, and that of a rolling one."""

    version: int
    update_to: int | None
    rolling_to: int | None


class Lengths(Message):
    """Expected lengths of samples, by model and key of their prompt."""

    lengths: list[tuple[str, int, float]]


class Placed(Message):
    """A replica has room for a rollout, which holds it now."""

    turn: int
    replica_id: str


class NotPlaced(Message):
    """A rollout was not placed."""

    turn: int
    failure: Failure


class Judged(Message):
    """The answer to `Judge` and `Examine`: True if the engine is dead."""

    turn: int
    is_dead: bool


class Withdraw(Message):
    """End the rollouts of a model that no replica has."""

    model: str


class Crew(Message):
    """The workers that serve."""

    serving: tuple[int, ...]


class Abort(Message):
    """End requests of these ids, those of `client` alone, with the tokens that they have; answered by `Done`."""

    call: int
    kind: AbortKind
    ids: tuple[str, ...]
    client: str | None


class Sync(Message):
    """Answer with `Done` once all messages before this one are dealt with."""

    call: int


class Stop(Message):
    """End: replies that are under way have some seconds."""


FromWorker = Ready | Place | Left | Judge | Over | Delivered | Progress | Examine | Batches | Done | Report
FromOwner = (
    Hello
    | Joined
    | Gone
    | Changed
    | Versions
    | Lengths
    | Placed
    | NotPlaced
    | Judged
    | Withdraw
    | Crew
    | Batches
    | Abort
    | Sync
    | Stop
)
