"""The trainer's ranks during a push of a sharded model: the first rank sends, the others help to gather.

All ranks go through the same parts and runs. Before each one the first rank leaves a word for the others in the store
by which torch's ranks have found each other, so that an error ends the push on every rank, and no rank enters a
collective that another has abandoned. The others leave digests of their tensors there, which it compares.
"""

import hashlib
import logging
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from engines.batches import batches
from engines.errors import DeadlineExceeded, InvalidRequest, RolloutGatewayError, WeightUpdateFailed
from engines.transfer.packing import NamedTensor
from trainer_client.served import ServedWeights
from trainer_client.transports.model_tensors import holders_of, is_sharded, placed
from trainer_client.transports.tensors import Entry, Given, announced

logger = logging.getLogger(__name__)

_RUN_BYTES = 256 << 20
"""Bytes gathered between two words of the first rank: its memory use beside its own shard."""
_WAITS_BETWEEN_WORDS = 5
"""Bounded waits of the sending rank between two words to the others, such as for a group or rollouts in flight."""
_FAILED = b"failed"
"""The digest of a rank that could not give its tensors."""


class Ranks:
    """The ranks of a push: this process alone, which has all tensors and makes each when its turn comes."""

    is_sender = True

    def begin(self, served: ServedWeights) -> None:
        """Begin as the sender."""

    def agree(self, entries: Sequence[Entry]) -> None:
        """Raise `InvalidRequest` on every rank unless all have these tensors next; none at the end."""

    def runs(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Return the entries as runs; a run is gathered at a time."""
        return [[entry] for entry in entries]

    def gather(self, run: Sequence[Entry]) -> list[torch.Tensor]:
        """Gather a run as the sender; return the whole tensors."""
        return [entry.made() for entry in run]

    def end(self, outcome: int | BaseException) -> None:
        """Report the sender's version or error to the other ranks."""

    def follow(self, given: Given, dtype: torch.dtype | None) -> int:
        """Take part in the push as another rank. Return the sender's version, or raise its error."""
        raise AssertionError("a single process is the sender")


class TrainerRanks(Ranks):
    """Several ranks, which must all make one for each push, of the same tensors. The sender waits `timeout_s` for the
    digests of a part, and the others, for its next word, as long as its own waits may take.

    Each rank counts its pushes, also those that fail. A push that a rank has missed fails on the others, and does not
    count for that rank.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self._ranks = sorted(ranks)
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self.is_sender = self._rank == self._ranks[0]
        # A connection of its own: a wait blocks others of the same one, as of NCCL's watchdog.
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store  # since torch 2.8
        self._store = dist.PrefixStore(f"rollout-gateway {self._ranks}", store)
        self._count = f"pushes of {self._rank}"
        self._push = self._store.add(self._count, 1)
        while not self.is_sender and self._store.check([f"{self._push}/missed"]):
            self._push = self._store.add(self._count, 1)
        self._words = 0
        self._parts = 0
        # A transport may gather on its own thread while the push is cancelled.
        self._turn = threading.Lock()
        self._is_over = False

    def begin(self, served: ServedWeights) -> None:
        with suppress(RuntimeError):
            self._store.delete_key(f"{self._push - 2}/1")  # megabytes for a model of many tensors
        self._say(served)

    def agree(self, entries: Sequence[Entry]) -> None:
        self._say("a part")
        mine = self._vote(_digest(entries))
        for rank in self._ranks:
            try:
                digest = self._get(self._ballot(rank))
            except DeadlineExceeded:
                self._set(f"{self._push}/missed", b"by a rank")
                raise
            if digest != mine:
                raise InvalidRequest(
                    f"trainer rank {rank} failed to give its tensors: its log has the reason"
                    if digest == _FAILED
                    else f"trainer rank {rank} pushes other tensors than rank {self._ranks[0]}: all ranks must push "
                    "the same model with the same arguments; pipeline stages are not supported",
                    param="named_tensors",
                )

    def runs(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        return list(batches(entries, attrgetter("num_bytes"), _RUN_BYTES))

    def gather(self, run: Sequence[Entry]) -> list[torch.Tensor]:
        self._say("a run")
        return super().gather(run)

    def end(self, outcome: int | BaseException) -> None:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RolloutGatewayError):
            outcome = RolloutGatewayError(f"{type(outcome).__name__}: {outcome}")
        try:
            self._say(outcome, last=True)
        except DeadlineExceeded as error:  # raised nowhere: the outcome is what it is
            logger.warning("the other trainer ranks could not be told of %s: %s", outcome, error)

    def follow(self, given: Given, dtype: torch.dtype | None) -> int:
        try:
            served: ServedWeights = self._hear()
        except DeadlineExceeded:
            if not self._store.check([f"{self._push}/1"]):  # the sender has not come, and this push is its next
                self._store.add(self._count, -1)
            raise
        try:
            self._follow(given.parts(served, dtype))
        except BaseException:
            with suppress(DeadlineExceeded):
                self._vote(_FAILED)  # of the next part, if the sender comes to it
            raise
        # The sender waits for the gateway now, which may take the replicas one after the other.
        return int(self._hear(max(1, served.num_replicas)))

    def _follow(self, parts: Iterator[list[Entry]]) -> None:
        """Go through the sender's parts and runs, and help to gather the tensors of which this rank has shards."""
        entries: list[Entry] | None = None
        while entries != []:
            self._hear()
            with self._logged():
                entries = next(parts, [])
            self._vote(_digest(entries))
            for run in self.runs(entries):
                self._hear()
                with self._logged():
                    for entry in run:
                        if is_sharded(entry.tensor) and self._ranks[0] in holders_of(entry.tensor):
                            entry.made()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log a failure of this rank, of which the others are told only that there was one."""
        try:
            yield
        except Exception:
            logger.exception("trainer rank %d cannot give its part of the weights", self._rank)
            raise

    def _say(self, word: object, *, last: bool = False) -> None:
        """Leave a word for the other ranks. Raise `WeightUpdateFailed` after the last one."""
        with self._turn:
            if self._is_over:
                raise WeightUpdateFailed("the push is over")
            self._is_over = last
            self._words += 1
            self._set(f"{self._push}/{self._words}", pickle.dumps(word))

    def _hear(self, turns: int = 1) -> Any:
        """Return the sender's next word, or raise its error."""
        self._words += 1
        word = pickle.loads(self._get(f"{self._push}/{self._words}", turns * _WAITS_BETWEEN_WORDS))
        if isinstance(word, RolloutGatewayError):
            raise word
        return word

    def _vote(self, digest: bytes) -> bytes:
        self._parts += 1
        self._set(self._ballot(self._rank), digest)
        return digest

    def _ballot(self, rank: int) -> str:
        return f"{self._push}/part {self._parts} of {rank}"

    def _set(self, key: str, value: bytes) -> None:
        with self._reached():
            self._store.set(key, value)

    def _get(self, key: str, waits: int = 1) -> bytes:
        with self._reached(waits):
            self._store.wait([key], timedelta(seconds=waits * self._timeout_s))
            return bytes(self._store.get(key))

    @contextmanager
    def _reached(self, waits: int = 1) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the store's, for all that can be wrong
            raise DeadlineExceeded(
                f"trainer rank {self._rank}: the ranks {self._ranks} did not all take part within "
                f"{waits * self._timeout_s:g} s, or a rank is gone; rank {self._ranks[0]} is the sender ({error})"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a push, whose tensors `ranks` gathers."""

    entries: Sequence[Entry]
    ranks: Ranks

    @property
    def announced(self) -> dict[str, object]:
        """The part in the form of /update_weights."""
        return announced(self.entries)

    @property
    def tensors(self) -> Iterator[NamedTensor]:
        """Yield each tensor when its turn comes, or gathered shortly before."""
        for run in self.ranks.runs(self.entries):
            for entry, tensor in zip(run, self.ranks.gather(run), strict=True):
                yield from entry.sent_as(tensor).items()


def _digest(entries: Sequence[Entry]) -> bytes:
    lines = (f"{entry.name} {entry.dtype} {entry.shape} {placed(entry.tensor)}" for entry in entries)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest().encode()
