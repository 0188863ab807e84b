"""The least time that a workload can take on a fleet, however it is placed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuning.simulate.speed import Speed
from tuning.simulate.workloads.workload import Ask, Chain, Phase, Workload


def bound_s(workload: Workload, replicas: Sequence[Speed]) -> float:
    """Return the time of all work at the fleet's best, or of the longest chain alone, whichever is longer.

    Streams run beside each other, so their work adds up; the phases of a stream cannot overlap.
    """
    fleet = _Fleet(replicas)
    streams = [[(fleet.work_s(phase), fleet.alone_s(phase)) for phase in stream] for stream in workload.streams]
    all_work = sum(work_s for stream in streams for work_s, _ in stream)
    return max(all_work, *(sum(max(phase) for phase in stream) for stream in streams))


@dataclass(slots=True)
class _Work:
    """Tokens to make, the tokens that are looked at meanwhile, and the most samples at a time."""

    tokens: int = 0
    looked_at: float = 0.0
    at_once: int = 0

    @classmethod
    def of(cls, phase: Phase) -> "_Work":
        work = cls()
        for chain in phase:
            work.at_once += max(len(ask.lengths) for ask in chain)
            for ask in chain:
                work.tokens += sum(ask.lengths)
                work.looked_at += sum(length * (ask.prompt + length / 2) for length in ask.lengths)
        return work


class _Fleet:
    """Replicas by their speed, with their number."""

    def __init__(self, replicas: Sequence[Speed]) -> None:
        self._speeds = list({id(speed): speed for speed in replicas}.values())
        self._counts = [sum(one is speed for one in replicas) for speed in self._speeds]

    def work_s(self, phase: Phase) -> float:
        """Return the seconds of a phase if all replicas share it, in batches as large as there can be."""
        work = _Work.of(phase)
        at_once = work.at_once / sum(self._counts)
        each = [_read_s(phase, speed) + _decode_s(work, at_once, speed) for speed in self._speeds]
        return 1 / sum(count / seconds for count, seconds in zip(self._counts, each, strict=True))

    def alone_s(self, phase: Phase) -> float:
        """Return the seconds of the longest chain on the fastest replica, if it is idle."""
        return max(min(_alone_s(chain, speed) for speed in self._speeds) for chain in phase)


def _read_s(phase: Phase, speed: Speed) -> float:
    return sum(_prefill_s(ask, speed) for chain in phase for ask in chain)


def _prefill_s(ask: Ask, speed: Speed) -> float:
    """Return the seconds to read a prompt that is found as far as it is known."""
    return speed.prefill_s(min(ask.known, ask.prompt - 1), ask.prompt)


def _decode_s(work: _Work, at_once: float, speed: Speed) -> float:
    context = work.looked_at / work.tokens
    largest = max(1.0, min(speed.max_num_seqs, at_once))
    return min(work.tokens / size * speed.step_s(size, size * context) for size in _sizes(largest))


def _sizes(largest: float) -> Iterator[float]:
    size = 1.0
    while size < largest:
        yield size
        size *= 2
    yield largest


def _alone_s(chain: Chain, speed: Speed) -> float:
    seconds = 0.0
    for ask in chain:
        longest = max(ask.lengths)
        seconds += ask.after_s + _prefill_s(ask, speed) + longest * speed.step_s(1, ask.prompt + longest / 2)
    return seconds
