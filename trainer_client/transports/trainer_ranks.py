"""The trainer's ranks during a push of a sharded model: the first rank sends, the others help to gather.

The first rank announces each step over a gloo group, so that no rank enters a collective that another has abandoned.
The other ranks wait for its messages as long as its own waits may take.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from operator import attrgetter

import torch
import torch.distributed as dist

from engines.batches import batches
from engines.errors import DeadlineExceeded, InvalidRequest, RolloutGatewayError, WeightUpdateFailed
from engines.transfer.packing import NamedTensor
from gateway.api import body_of, error_of, status_of
from trainer_client.http import Json
from trainer_client.served import ServedWeights
from trainer_client.transports.model_tensors import holders_of, is_sharded, placed
from trainer_client.transports.tensors import Entry, Given, announced

logger = logging.getLogger(__name__)

Outcome = tuple[int, ServedWeights | None]
"""The version, and the served weights if the ranks need them."""
Narrow = Callable[[list[Entry], ServedWeights], list[Entry]]

_RUN_BYTES = 256 << 20
"""Bytes gathered between two messages of the first rank: its memory use beside its own shard."""
_WORDS_IN_SILENCE = 4
"""Messages of a waiting sender in the longest silence."""
_DIGEST_BYTES = 16
_NONE = b"\0" * _DIGEST_BYTES
_generations: dict[tuple[int, ...], str] = {}
"""Generation of this process's last group of each ranks."""


class Ranks:
    """The ranks of a push: this process alone, which has all tensors and makes each when its turn comes."""

    is_sender = True

    def follow(self, given: Given, dtype: torch.dtype | None, narrow: Narrow) -> Outcome:
        """Take part in the push as another rank. Return the sender's result, or raise its error.

        `narrow` selects the tensors to send, as on the sender.
        """
        raise AssertionError("a single process is the sender")

    def agree(self, entries: Sequence[Entry], served: ServedWeights) -> None:
        """Raise `InvalidRequest` on every rank unless all have the same tensors."""

    def agree_on_end(self, served: ServedWeights) -> None:
        """Raise `InvalidRequest` on every rank unless all have come to the end of their tensors."""

    def any_rank(self, flags: Sequence[bool], *, failed: bool = False) -> list[bool]:
        """Return each flag as set if set on any rank. Raise `InvalidRequest` where another rank has `failed`."""
        return list(flags)

    def runs(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Return the entries as runs; a run is gathered at a time."""
        return [[entry] for entry in entries]

    def gather(self, run: Sequence[Entry]) -> list[torch.Tensor]:
        """Gather a run as the sender; return the whole tensors."""
        return [entry.made() for entry in run]

    def end(self, outcome: Outcome | BaseException) -> None:
        """Report the sender's result to the other ranks."""


class TrainerRanks(Ranks):
    """Several ranks, which must all create this and push the same tensors. A message is awaited for `silence_s`.

    Its group is none of torch's own groups: their names count all groups of a process, and ranks that are in different
    numbers of them would not meet. All ranks have the same `options`, a text.
    """

    def __init__(self, ranks: Sequence[int], silence_s: float, options: str = "") -> None:
        self._ranks = sorted(ranks)
        self._silence_s = silence_s
        self._options = options
        self._is_broken = False
        self._world = _world()
        place = self._ranks.index(dist.get_rank())
        with self._together():
            store = _meeting(self._ranks)
            self._group = dist.ProcessGroupGloo(store, place, len(self._ranks), timedelta(seconds=silence_s))
        self.is_sender = place == 0
        # A transport may gather on its own thread while the push is cancelled.
        self._turn = threading.Lock()
        self._is_over = False
        self._outcome = threading.Event()

    @property
    def is_over(self) -> bool:
        """True where a wait has failed, or the trainer has ended torch.distributed since."""
        return self._is_broken or not dist.is_initialized() or _world() is not self._world

    def begun(self) -> "TrainerRanks":
        """Start the next push; return self."""
        self._is_over = False
        self._outcome = threading.Event()
        return self

    def follow(self, given: Given, dtype: torch.dtype | None, narrow: Narrow) -> Outcome:
        parts: Iterator[list[Entry]] | None = None
        runs: Iterator[list[Entry]] = iter(())
        while "version" not in (word := self._hear()):
            if "waits" in word:
                continue
            if "part" in word:
                served = ServedWeights.read(word["part"])
                parts = parts or given.parts(served, dtype)
                entries = self._next_part(parts)
                runs = iter(self.runs(narrow(entries, served) if entries else []))
            else:
                try:
                    self._help(next(runs))
                except Exception as error:  # reported with the next part, unless the sender fails before it
                    logger.exception("trainer rank %d cannot gather its part of the weights", dist.get_rank())
                    # No further tensor is gathered: its shards would take the place of this one's.
                    runs, parts = repeat([]), map(_raise, repeat(error))
        return int(word["version"]), word["served"] and ServedWeights.read(word["served"])

    def _help(self, run: Sequence[Entry]) -> None:
        """Gather a run with the sender, if it has shards of the same tensors."""
        for entry in run:
            if is_sharded(entry.tensor) and self._ranks[0] in holders_of(entry.tensor):
                entry.made()

    def agree(self, entries: Sequence[Entry], served: ServedWeights) -> None:
        with self._turn:
            self._say({"part": served.json()})
            self._compare(self._digest(entries))

    def agree_on_end(self, served: ServedWeights) -> None:
        self.agree((), served)
        threading.Thread(target=self._keep_waiting, args=(self._outcome,), name="weight ranks", daemon=True).start()

    def _keep_waiting(self, outcome: threading.Event) -> None:
        """Tell the other ranks that the sender waits for the gateway, which may take many replicas in turn."""
        while not outcome.wait(self._silence_s / _WORDS_IN_SILENCE):
            with self._turn:
                if outcome.is_set() or self._is_broken:
                    return
                with suppress(DeadlineExceeded):  # a rank is gone, and the outcome finds that too
                    self._say({"waits": True})

    def any_rank(self, flags: Sequence[bool], *, failed: bool = False) -> list[bool]:
        held = torch.tensor([failed, *flags], dtype=torch.uint8, device="cpu")
        with self._together():
            self._group.allreduce(held, dist.ReduceOp.MAX).wait()
        has_failed, *found = map(bool, held.tolist())
        if has_failed:
            self._is_over = True  # known to all ranks now
        if has_failed and not failed:
            raise InvalidRequest("another trainer rank could not choose its tensors: its log has the reason")
        return found

    def runs(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        return list(batches(entries, attrgetter("num_bytes"), _RUN_BYTES))

    def gather(self, run: Sequence[Entry]) -> list[torch.Tensor]:
        with self._turn:
            if self._is_over:
                raise WeightUpdateFailed("the push is over")
            self._say({"run": len(run)})
            return super().gather(run)

    def end(self, outcome: Outcome | BaseException) -> None:
        self._outcome.set()
        # If a gather is still running, a rank is gone; the other ranks time out.
        if not self._turn.acquire(timeout=self._silence_s):
            return
        try:
            if self._is_over:
                return
            self._is_over = True
            if isinstance(outcome, BaseException):
                self._say(_failure(outcome))
            else:
                self._say_success(*outcome)
        finally:
            self._turn.release()

    def _say_success(self, version: int, served: ServedWeights | None) -> None:
        """Tell the other ranks. The version is served, also where a rank is gone: an error would deny that."""
        try:
            self._say({"version": version, "served": served and served.json()})
        except DeadlineExceeded as error:
            logger.warning("weight version %d is served, but not all ranks could be told: %s", version, error)

    def _next_part(self, parts: Iterator[list[Entry]]) -> list[Entry]:
        """Return the next part, empty after the last. Report a failure to the other ranks."""
        try:
            entries = next(parts, [])
        except Exception:  # also of the trainer's own iterator: the others would wait for `silence_s`
            self._compare(_NONE)
            raise
        self._compare(self._digest(entries))
        return entries

    def _digest(self, entries: Sequence[Entry]) -> bytes:
        lines = (f"{entry.name} {entry.dtype} {entry.shape} {placed(entry.tensor)}" for entry in entries)
        return hashlib.blake2b("\n".join((self._options, *lines)).encode(), digest_size=_DIGEST_BYTES).digest()

    def _compare(self, mine: bytes) -> None:
        heard = [torch.empty(_DIGEST_BYTES, dtype=torch.uint8, device="cpu") for _ in self._ranks]
        with self._together():
            self._group.allgather(heard, torch.frombuffer(bytearray(mine), dtype=torch.uint8)).wait()
        for rank, other in zip(self._ranks, heard, strict=True):
            if not torch.equal(other, heard[0]):
                self._is_over = True  # known to all ranks now
                raise InvalidRequest(
                    f"trainer rank {rank} failed to give its tensors: its log has the reason"
                    if bytes(other.numpy()) == _NONE
                    else f"trainer rank {rank} pushes other tensors than rank {self._ranks[0]}: all ranks must push "
                    "the same model with the same arguments; pipeline stages are not supported",
                    param="named_tensors",
                )

    def _hear(self) -> Json:
        """Return the sender's next message, or raise its error."""
        word: Json = json.loads(self._broadcast(None))
        if "error" in word:
            raise error_of(word["status"], word)
        return word

    def _say(self, word: Json) -> None:
        self._broadcast(json.dumps(word).encode())

    def _broadcast(self, content: bytes | None) -> bytes:
        """Return the sender's content on every rank."""
        size = torch.tensor([len(content or b"")], device="cpu")
        with self._together():
            self._group.broadcast(size, 0).wait()
            held = (
                torch.frombuffer(bytearray(content), dtype=torch.uint8)
                if content
                else torch.empty(int(size), dtype=torch.uint8, device="cpu")
            )
            self._group.broadcast(held, 0).wait()
        return bytes(held.numpy())

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's, for all that can be wrong
            self._is_broken = True
            raise DeadlineExceeded(
                f"trainer rank {dist.get_rank()}: the ranks {self._ranks} did not all take part within "
                f"{self._silence_s:g} s, or a rank is gone; rank {self._ranks[0]} is the sender ({error})"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part. `ranks` gathers its tensors; `on_sent` is called after each tensor."""

    entries: Sequence[Entry]
    ranks: Ranks
    on_sent: Callable[[Entry], None]

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
                self.on_sent(entry)


def _world() -> object:
    """Return torch's group of all ranks, another one after each `init_process_group`."""
    return dist.distributed_c10d._get_default_group()


def _meeting(ranks: Sequence[int]) -> dist.Store:
    """Return the store in which these ranks meet for their next group. A store has the addresses of one group, so each
    generation has its own. The first rank that needs the next generation begins it, and the others follow."""
    store = dist.PrefixStore(f"rollout-gateway {ranks}", dist.distributed_c10d._get_default_store())
    generation = store.compare_set("generation", "", "0").decode()
    if generation == _generations.get(tuple(ranks)):
        generation = store.compare_set("generation", generation, str(int(generation) + 1)).decode()
    _generations[tuple(ranks)] = generation
    return dist.PrefixStore(generation, store)


def _raise(error: Exception) -> list[Entry]:
    raise error


def _failure(error: BaseException) -> Json:
    known = error if isinstance(error, RolloutGatewayError) else RolloutGatewayError(f"{type(error).__name__}: {error}")
    return {**body_of(known), "status": status_of(known)}
