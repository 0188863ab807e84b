"""A reference for the modelled engine: the same rules, one step after the other, token by token."""

from dataclasses import dataclass, field

from tuning.simulate.speed import Speed


@dataclass(eq=False)
class Job:
    """A sample that arrives at a time."""

    at: float
    prefix: str
    prompt: int
    tokens: int
    goes_on: bool = False
    made: int = 0
    ended_at: float = 0.0


@dataclass
class StepwiseEngine:
    """`idle` has the tokens of idle prefixes, least recently used first."""

    speed: Speed
    now: float = 0.0
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    idle: dict[object, int] = field(default_factory=dict)
    found: int = 0
    preemptions: int = 0

    def run(self, jobs: list[Job]) -> None:
        """Run all jobs, in the order of their arrival, to their end."""
        coming = sorted(jobs, key=lambda job: job.at)
        while coming or self.waiting or self.running:
            if not self.running and not self.waiting:
                self.now = max(self.now, coming[0].at)
            while coming and coming[0].at <= self.now + 1e-9:
                self.waiting.append(coming.pop(0))
            self._step()

    def _step(self) -> None:
        preempted = False
        while self._used + len(self.running) > self.speed.kv_tokens:
            self._preempt(self.running[-1])
            preempted = True
        while not preempted and self.waiting and self._fits(self.waiting[0]):
            self._admit(self.waiting.pop(0))
        context = sum(job.prompt + job.made for job in self.running)
        self.now += self.speed.step_s(len(self.running), context)
        for job in self.running:
            job.made += 1
            self._evict()
        for job in [job for job in self.running if job.made == job.tokens]:
            self._release(job)
            job.ended_at = self.now

    @property
    def _used(self) -> int:
        prompts = {job.prefix: job.prompt for job in self.running}
        return sum(prompts.values()) + sum(job.made for job in self.running)

    def _fits(self, job: Job) -> bool:
        if len(self.running) == self.speed.max_num_seqs:
            return False
        shared = any(other.prefix == job.prefix for other in self.running)
        needed = (0 if shared else job.prompt) + job.made
        return self._used + needed + len(self.running) + 1 <= self.speed.kv_tokens

    def _admit(self, job: Job) -> None:
        found = job.prompt
        if not any(other.prefix == job.prefix for other in self.running):
            found = min(self.idle.pop(job.prefix, 0), job.prompt)
        own = self.idle.pop(job, 0)
        found += own if found == job.prompt else 0
        found = min(found, job.prompt + job.made - 1)
        self.found += found
        self.now += self.speed.prefill_s(found, job.prompt + job.made)
        self.running.append(job)
        self._evict()

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self.waiting.insert(0, job)
        self._release(job, ends=False)

    def _release(self, job: Job, *, ends: bool = True) -> None:
        self.running.remove(job)
        goes_on = ends and job.goes_on
        if not goes_on:
            self.idle[job] = job.made
        if not any(other.prefix == job.prefix for other in self.running):
            self.idle.pop(job.prefix, 0)
            self.idle[job.prefix] = job.prompt + (job.made if goes_on else 0)
        self._evict()

    def _evict(self) -> None:
        while self.idle and self._used + sum(self.idle.values()) > self.speed.kv_tokens:
            oldest = next(iter(self.idle))
            self.idle[oldest] -= 1
            if self.idle[oldest] <= 0:
                del self.idle[oldest]
