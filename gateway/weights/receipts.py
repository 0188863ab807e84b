"""Compares the digests of the bytes that replicas received, before any of them commits."""

from collections import Counter
from collections.abc import Mapping

from engines.errors import WeightUpdateFailed
from gateway.fleet.replica import Replica

Digests = Mapping[str, str]
"""A digest by tensor name, from `Engine.close_receipt`; empty from an engine without digests."""


def check_receipts(received: Mapping[Replica, Digests]) -> None:
    """Raise `WeightUpdateFailed` with the tensor, and the replica that received other bytes than most.

    Devices have different kinds of digest; replicas are compared within a kind.
    """
    by_kind: dict[str, dict[Replica, Digests]] = {}
    for replica, digests in received.items():
        kind = next(iter(digests.values()), "").partition(":")[0]
        if kind:
            by_kind.setdefault(kind, {})[replica] = digests
    for peers in by_kind.values():
        _check_peers(peers)


def _check_peers(received: Mapping[Replica, Digests]) -> None:
    first, *others = received.values()
    if all(digests == first for digests in others):
        return
    for name in sorted({name for digests in received.values() for name in digests}):
        votes = Counter(digests.get(name, "nothing") for digests in received.values())
        if len(votes) == 1:
            continue
        (most, count), (_, next_count) = votes.most_common(2)
        digest = {replica: digests.get(name, "nothing") for replica, digests in received.items()}
        odd = [replica for replica in digest if digest[replica] != most] if count > next_count else list(digest)
        names = " and ".join(f"{replica.replica_id} ({digest[replica]})" for replica in odd)
        finding = f"replica {names} received other bytes than its peers" if count > next_count else f"{names} differ"
        raise WeightUpdateFailed(
            f"tensor {name!r} arrived with different bytes: {finding}; the update is not served, send it again",
            replica_id=odd[0].replica_id,
        )
