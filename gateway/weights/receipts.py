"""Did all replicas receive the same bytes? Digests of an update, compared before anybody commits."""

from collections import Counter
from collections.abc import Mapping

from engines.errors import WeightUpdateFailed
from gateway.fleet.replica import Replica

Digests = Mapping[str, str]
"""A digest by tensor name, as `Engine.close_receipt` tells them; empty from an engine that cannot."""


def check_receipts(received: Mapping[Replica, Digests]) -> None:
    """Raises `WeightUpdateFailed`, which names the replica that received other bytes than most, and the tensor.

    Engines of different devices digest differently, so replicas are compared within one kind of digest.
    """
    by_kind: dict[str, dict[Replica, Digests]] = {}
    for replica, digests in received.items():
        kind = next(iter(digests.values()), "").partition(":")[0]
        if kind:
            by_kind.setdefault(kind, {})[replica] = digests
    for peers in by_kind.values():
        _check_peers(peers)


def _check_peers(received: Mapping[Replica, Digests]) -> None:
    for name in sorted({name for digests in received.values() for name in digests}):
        votes = Counter(digests.get(name, "nothing") for digests in received.values())
        if len(votes) == 1:
            continue
        (most, count), (_, next_count) = votes.most_common(2)
        told = {replica: digests.get(name, "nothing") for replica, digests in received.items()}
        odd = [replica for replica in told if told[replica] != most] if count > next_count else list(told)
        names = " and ".join(f"{replica.replica_id} ({told[replica]})" for replica in odd)
        who = f"replica {names} received other bytes than its peers" if count > next_count else f"{names} differ"
        raise WeightUpdateFailed(
            f"tensor {name!r} did not arrive alike: {who}; nobody serves this update, send it again",
            replica_id=odd[0].replica_id,
        )
