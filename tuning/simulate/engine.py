"""A model of one engine: continuous batching, computed from one event to the next.

Between two events the batch is the same, and its steps differ by the tokens that they look at alone. An event is the
end of a sample, the moment that the KV cache is full, or the end of the step in which a sample arrives that has room.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tuning.simulate.kv_cache import Key, KvCache
from tuning.simulate.speed import Speed


@dataclass(eq=False, slots=True, kw_only=True)
class Sample:
    """One sample. `prefix` names its prompt in the KV cache; `goes_on` where the next prompt of that name begins with
    the sample, as a session's does.

    `known` tokens of the prompt were computed before, by whichever engine. `made` tokens were made before it was added,
    stopped or preempted. `ended` is called once all tokens are made.
    """

    prefix: Key
    prompt: int
    tokens: int
    ended: Callable[[], None]
    goes_on: bool = False
    known: int = 0
    made: int = 0
    last_step: int = 0
    admission: int = 0


@dataclass(slots=True)
class Counts:
    """Tokens that were made, read, looked up in the cache, found there, and read although they were computed before."""

    made: int = 0
    read: int = 0
    queried: int = 0
    found: int = 0
    again: int = 0
    preemptions: int = 0
    busy_s: float = 0.0


class ModelledEngine:
    """One engine. `_steps` were made until `_at`, on the running loop's clock, and the batch is the same since."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.counts = Counts()
        self.kv = KvCache(speed.kv_tokens)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Sample] = deque()
        self._running: dict[Sample, None] = {}
        self._lasts: list[tuple[int, int, Sample]] = []
        self._admissions = 0
        self._steps, self._at, self._context = 0, 0.0, 0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Samples in the batch."""
        return len(self._running)

    @property
    def steps(self) -> int:
        """Decode steps so far."""
        return self._steps

    def add(self, samples: Iterable[Sample]) -> None:
        """Queue samples that fit into the KV cache, each by itself."""
        self._waiting.extend(samples)
        if not self._running:
            self._at = self._loop.time()
            self._change_batch()
        elif self._has_room:
            self._wake_at(min(self._next, self._steps + self._steps_until(self._loop.time())))

    def stop(self, samples: Iterable[Sample]) -> None:
        """End samples at the end of the step that runs; `made` counts their tokens."""
        if self._running and self._at < self._loop.time():
            self._next = min(self._next, self._steps + self._steps_until(self._loop.time()))
            self._advance()
            self._end()
        for sample in samples:
            if sample in self._running:
                del self._running[sample]
                self._put_back(sample)
            elif sample in self._waiting:
                self._waiting.remove(sample)
        self._change_batch()

    @property
    def _has_room(self) -> bool:
        """True if the first that waits can be admitted, and every running sample can grow."""
        if not self._waiting or len(self._running) >= self.speed.max_num_seqs:
            return False
        first = self._waiting[0]
        needed = self.kv.new_tokens(first.prefix, first.prompt) + first.made
        return needed + len(self._running) + 1 <= self.kv.free

    def _reach_event(self) -> None:
        self._advance()
        self._change_batch()

    def _advance(self) -> None:
        """Make the steps up to the next event."""
        steps, sequences = self._next - self._steps, len(self._running)
        seconds = self._span_s(steps)
        self._steps = self._next
        self._at += seconds
        self._context += steps * sequences
        self.counts.busy_s += seconds
        self.counts.made += steps * sequences
        self.kv.use(steps * sequences)

    def _change_batch(self) -> None:
        self._end()
        if not self._preempt():
            self._admit()
        if self._running:
            growing = self.kv.free // len(self._running)
            self._wake_at(min(self._first_last(), self._steps + growing))

    def _end(self) -> None:
        while self._running and self._first_last() == self._steps:
            sample = heapq.heappop(self._lasts)[2]
            del self._running[sample]
            self._context -= sample.prompt + sample.tokens
            sample.made = sample.tokens
            if sample.goes_on:
                self.kv.let_go(sample.prefix, sample.tokens)
            else:
                self.kv.leave(sample, sample.tokens)
                self.kv.let_go(sample.prefix)
            sample.ended()

    def _first_last(self) -> int:
        """Return the step in which the next sample ends."""
        while True:
            last, admission, sample = self._lasts[0]
            if sample in self._running and sample.admission == admission:
                return last
            heapq.heappop(self._lasts)  # it was preempted

    def _preempt(self) -> bool:
        """Send the youngest sequences back until each of the others has room for a token; return if there were any."""
        before = self.counts.preemptions
        while self.kv.free < len(self._running):
            sample, _ = self._running.popitem()
            self._put_back(sample)
            self._waiting.appendleft(sample)
            self.counts.preemptions += 1
        return self.counts.preemptions > before

    def _put_back(self, sample: Sample) -> None:
        """Free the KV of a sample that ran."""
        sample.made = sample.tokens - (sample.last_step - self._steps)
        self._context -= sample.prompt + sample.made
        self.kv.leave(sample, sample.made)
        self.kv.let_go(sample.prefix)

    def _admit(self) -> None:
        while self._has_room:
            sample = self._waiting.popleft()
            seconds = self._read(sample)
            self._at += seconds
            self.counts.busy_s += seconds
            self._admissions += 1
            sample.admission = self._admissions
            sample.last_step = self._steps + sample.tokens - sample.made
            self._running[sample] = None
            heapq.heappush(self._lasts, (sample.last_step, sample.admission, sample))
            self._context += sample.prompt + sample.made

    def _read(self, sample: Sample) -> float:
        """Take a sample's KV, and return the seconds to compute what the cache lacks."""
        counts, length = self.counts, sample.prompt + sample.made
        found = self.kv.hold(sample.prefix, sample.prompt)
        if sample.made:
            own = self.kv.resume(sample, sample.made)
            found += own if found == sample.prompt else 0
        found = min(found, length - 1)  # the last token is always computed
        counts.queried += length
        counts.found += found
        counts.read += length - found
        counts.again += max(0, (length if sample.made else sample.known) - found)
        return self.speed.prefill_s(found, length)

    def _wake_at(self, step: int) -> None:
        """Have the next event after so many steps."""
        if self._timer is not None:
            self._timer.cancel()
        self._next = step
        self._timer = self._loop.call_at(self._at + self._span_s(step - self._steps), self._reach_event)

    def _span_s(self, steps: int) -> float:
        """Return the seconds of so many steps of this batch: as many as that of the middle one."""
        sequences = len(self._running)
        return steps * self.speed.step_s(sequences, self._context + sequences * (steps - 1) / 2)

    def _steps_until(self, at: float) -> int:
        """Return the number of steps, at least 1, of which the last ends at a time or after it."""
        low, high = 1, max(1, self._next - self._steps)
        while low < high:
            middle = (low + high) // 2
            if self._at + self._span_s(middle) >= at:
                high = middle
            else:
                low = middle + 1
        return low
