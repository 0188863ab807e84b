"""The leases of trainers: each is a connection that stays open while its trainer lives.

An update that was opened under a lease ends with the lease, so that a trainer's death between two calls is noticed at
once. Trainers without a lease are noticed by their silence (`weights.idle_timeout_s`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from engines.errors import WeightUpdateConflict
from gateway.weights.updates.record import UpdateRecord


class Leases:
    """The names of all leases that are held now. A trainer chooses its name, which no other trainer has."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    @contextmanager
    def held(self, lease: str) -> Iterator[None]:
        """Hold the lease during the block."""
        if lease in self._held:
            raise WeightUpdateConflict(f"lease = {lease!r} is held by another connection: choose a name of your own")
        self._held.add(lease)
        try:
            yield
        finally:
            self._held.discard(lease)

    def check(self, lease: str | None) -> None:
        """Raise `WeightUpdateConflict` for a lease whose connection has ended."""
        if lease is not None and lease not in self._held:
            raise WeightUpdateConflict(
                f"lease = {lease!r} is not held: keep POST /v1/weight_lease open beside the update"
            )

    def check_own(self, update: UpdateRecord | None, lease: str | None) -> None:
        """Raise `WeightUpdateConflict` where the open update was begun under another lease than the caller's."""
        if update is not None and update.lease != lease:
            raise WeightUpdateConflict(
                "the open update is another trainer's (its calls carry another lease): begin with "
                "/init_weight_transfer_engine and /start_weight_update"
            )

    def is_held(self, update: UpdateRecord | None) -> bool:
        """Return True for an open update whose trainer lives: it holds the update's lease."""
        return update is not None and update.lease in self._held

    def has_ended(self, update: UpdateRecord) -> bool:
        """Return True for an update under a lease that is held no more."""
        return update.lease is not None and update.lease not in self._held
