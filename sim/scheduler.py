"""Continuous batching of the simulated engine in virtual time: admission, step cost and KV use.

The loop is at most 1 ms ahead of the real clock, and runs many steps per turn of the event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from engines.config import SimConfig
from engines.types import PauseMode
from sim.model import CHECKPOINT_VERSION, EOS_TOKEN, SimModel, detokenize, read

BLOCK_TOKENS = 16
BATCHED_TOKENS = 8192
"""vLLM's step on a large GPU."""
_AHEAD_S = 0.001  # the event loop's timers are no finer
_LOOK_S = 0.02  # how often a wedged engine looks for its end
_TURN_S = 0.005  # longest run of steps before connections get their turn


@dataclass(eq=False, slots=True, kw_only=True)
class Sample:
    """One completion: its request and state. Puts itself on `reports` every `report_every` tokens and at its end."""

    request_id: str
    index: int
    prompt: list[int]
    context: int
    draw: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    prompt_blocks: list[int]
    reads_cache: bool
    report_every: int
    report_at: int
    reports: "asyncio.Queue[Sample]"
    tokens: list[int] = field(default_factory=list)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    unread: int = 0
    """Tokens of its prompt to read, while the engine reads it in several steps."""
    neighbours: int = 0
    finish_reason: str | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    stop_reason: str | int | None = None
    adapter: str = ""
    names_end: int = 0
    """Characters of the names of its reported tokens, from which the offsets of the next chunk go on."""

    @property
    def held_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        """Return (weight version, start, end) of each run of tokens."""
        ends = [start for _, start in self.version_starts[1:]] + [len(self.tokens)]
        runs = zip(self.version_starts, ends, strict=False)
        return [(version, start, end) for (version, start), end in runs if start < end]

    def is_stopped(self, token_id: int) -> bool:
        """Return True if `token_id`, just added, is a stop token or completes a stop string."""
        if token_id in self.stop_token_ids:
            self.stop_reason = token_id
            return True
        for stop in self.stop_strings:
            if detokenize(self.tokens[-len(stop) :]).endswith(stop):
                self.stop_reason = stop
                return True
        return False

    def meet_weights(self, version: str) -> None:
        """Record that further tokens are made by `version`."""
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.tokens)))


class PrefixCache:
    """Hashes of cached token blocks, least recently used first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_blocks = capacity_tokens // BLOCK_TOKENS
        self._blocks: dict[int, None] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0

    def lookup(self, sample: Sample) -> int:
        """Return the number of cached prompt tokens; the last token is never cached."""
        hits = 0
        for block in sample.prompt_blocks[: (len(sample.prompt) - 1) // BLOCK_TOKENS]:
            if block not in self._blocks:
                break
            hits += 1
        self.queried_tokens += len(sample.prompt)
        self.hit_tokens += hits * BLOCK_TOKENS
        return hits * BLOCK_TOKENS

    def remember(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._capacity_blocks:
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        self._blocks.clear()


def block_hashes(token_ids: list[int], salt: str | None) -> list[int]:
    """Return a hash per full block, of all tokens up to its end."""
    hashes: list[int] = []
    parent = hash(salt)
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hash((parent, *token_ids[start : start + BLOCK_TOKENS]))
        hashes.append(parent)
    return hashes


class SimScheduler:
    """Runs samples on one simulated replica."""

    def __init__(
        self, config: SimConfig, model: SimModel, max_num_seqs: int, max_num_batched_tokens: int = BATCHED_TOKENS
    ) -> None:
        self.config = config
        self._max_num_batched_tokens = max_num_batched_tokens
        self._model = model
        self._stalled_at: int | None = None
        self._max_num_seqs = max_num_seqs
        self.is_wedged: Callable[[], bool] = lambda: False
        self._work = asyncio.Event()
        self._drained = asyncio.Event()
        self.cache = PrefixCache(config.kv_tokens)
        self.running: list[Sample] = []
        self.waiting: deque[Sample] = deque()
        self.version = CHECKPOINT_VERSION
        self.paused: PauseMode | None = None
        self.kv_used = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps = 0
        self.preemptions = 0
        self.finished: dict[str, int] = {}
        self.finished_lengths: Counter[int] = Counter()

    async def run(self) -> None:
        """Generate until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._work.wait()
            virtual_s = clock()
            turn_ends_s = virtual_s + _TURN_S
            while self._can_step:
                while self.is_wedged():
                    await asyncio.sleep(_LOOK_S)
                    virtual_s = clock()
                virtual_s += self._begin_step()
                if virtual_s > clock() + _AHEAD_S or clock() > turn_ends_s:
                    await asyncio.sleep(max(0.0, virtual_s - clock()))
                    turn_ends_s = clock() + _TURN_S
                if self.paused is not PauseMode.KEEP:
                    self._end_step()
            self._work.clear()

    def add(self, samples: Iterable[Sample]) -> None:
        self.waiting.extend(samples)
        self._work.set()

    def abort(self, samples: Collection[Sample]) -> None:
        """End unfinished samples with the tokens they have."""
        for sample in samples:
            if sample.finish_reason is None:
                self._finish(sample, "abort")
        self.running = [sample for sample in self.running if sample.finish_reason is None]
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)
        self._account()

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Queue new samples until `resume`; `mode` decides on the running ones."""
        if mode is PauseMode.ABORT:
            self.abort([*self.running, *self.waiting])
        self.paused = mode
        self._work.set()  # samples frozen by an earlier keep run to their end
        while mode is PauseMode.WAIT and self.running:
            self._drained.clear()
            await self._drained.wait()
        if clear_cache:
            self.reset_prefix_cache(preempt=True)

    def resume(self) -> None:
        self.paused = None
        self._work.set()

    def stall(self, after: int) -> None:
        """Make no token of a sample beyond its first `after` from here on, as an engine that hangs; see `go_on`."""
        self._stalled_at = after

    def go_on(self) -> None:
        """End a stall."""
        self._stalled_at = None
        self._work.set()

    @property
    def stalled(self) -> list[Sample]:
        """Running samples that get no token, as the engine stalls."""
        return [] if self._stalled_at is None else [one for one in self.running if self._is_stalled(one)]

    def hold_version(self, version: str) -> None:
        """Use weights `version` from the next step on."""
        self.version = version
        for sample in self.running:
            sample.meet_weights(version)

    def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Forget all KV; return False if running samples hold theirs. With `preempt` they are prefilled again."""
        if self.running and not preempt:
            return False
        while self.running:
            self._preempt()
        for sample in self.waiting:
            sample.unread = 0
        self.cache.clear()
        return True

    @property
    def _can_step(self) -> bool:
        return self.paused is not PauseMode.KEEP and bool(self._moving or (self.waiting and self.paused is None))

    @property
    def _moving(self) -> list[Sample]:
        """Running samples that get a token in each step."""
        if self._stalled_at is None:
            return self.running
        return [sample for sample in self.running if not self._is_stalled(sample)]

    def _is_stalled(self, sample: Sample) -> bool:
        return self._stalled_at is not None and len(sample.tokens) >= self._stalled_at

    def _begin_step(self) -> float:
        """Choose the batch; return the seconds of the step."""
        cost_s = self._admit()
        while self.kv_used + len(self.running) > self.config.kv_tokens:
            self._preempt()
        others = max(0, len(self.running) - 1)
        return cost_s + self.config.decode_step_s + self.config.decode_step_per_seq_s * others

    def _admit(self) -> float:
        """Read prompts that fit, in order of arrival, and start their samples; return the seconds of prefill.

        As in vLLM's chunked prefill a step takes the running samples, then of prompts what is left of its tokens: many
        prompts make many long steps, each with one token of the running samples.
        """
        prefilled, left = 0, self._max_num_batched_tokens - len(self.running)
        while self.waiting and self.paused is None and len(self.running) < self._max_num_seqs and prefilled < left:
            sample = self.waiting[0]
            # One more for the token of this step.
            if self.kv_used + len(self.running) + sample.held_tokens + 1 > self.config.kv_tokens:
                break
            if not sample.unread:
                sample.cached_tokens = self.cache.lookup(sample) if sample.reads_cache else 0
                sample.unread = sample.held_tokens - sample.cached_tokens
            part = min(sample.unread, left - prefilled)
            prefilled += part
            sample.unread -= part
            if sample.unread:
                break
            self.waiting.popleft()
            self.cache.remember(sample.prompt_blocks)
            sample.neighbours = len(self.running)
            self.prompt_tokens += 0 if sample.version_starts else len(sample.prompt)
            sample.meet_weights(self.version)
            self.running.append(sample)
            self.kv_used += sample.held_tokens
        return prefilled / self.config.prefill_tokens_per_s

    def _end_step(self) -> None:
        """Add one token to each running sample."""
        next_token = self._model.next_token
        keys = {"": self._model.key(self.version)}
        ended, moving = False, self._moving
        for sample in moving:
            made = len(sample.tokens) + 1
            if (weights := keys.get(sample.adapter)) is None:
                weights = keys[sample.adapter] = self._model.key(self.version, sample.adapter)
            may_end = not sample.ignore_eos and made > sample.min_tokens
            token_id = next_token(sample.context, sample.draw, weights, may_end)
            sample.tokens.append(token_id)
            sample.context = read((token_id,), sample.context)
            stops = token_id == EOS_TOKEN or (made >= sample.min_tokens and sample.is_stopped(token_id))
            if stops or made >= sample.max_tokens:
                self._finish(sample, "stop" if stops else "length")
                ended = True
            elif made >= sample.report_at:
                sample.report_at = made + sample.report_every
                sample.reports.put_nowait(sample)
        self.steps += 1
        self.generated_tokens += len(moving)
        self.kv_used += len(moving)
        if ended:
            self.running = [sample for sample in self.running if sample.finish_reason is None]
            self._account()

    def _preempt(self) -> None:
        """Return the youngest running sample to the queue; it keeps its tokens and is prefilled again."""
        sample = self.running.pop()
        self.waiting.appendleft(sample)
        self.kv_used -= sample.held_tokens
        self.preemptions += 1

    def _finish(self, sample: Sample, reason: str) -> None:
        sample.finish_reason = reason
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.finished_lengths[len(sample.tokens)] += 1
        sample.reports.put_nowait(sample)

    def _account(self) -> None:
        self.kv_used = sum(sample.held_tokens for sample in self.running)
        if not self.running:
            self._drained.set()
