"""The modelled engine, which counts from event to event, beside a reference that counts step by step."""

import asyncio
import random

import pytest

from tests.tuning.simulate.stepwise_engine import Job, StepwiseEngine
from tuning.simulate import virtual_time
from tuning.simulate.engine import ModelledEngine, Sample
from tuning.simulate.speed import SetSpeed


def speed(kv_tokens: int = 100_000, max_num_seqs: int = 8, context_s: float = 0.0) -> SetSpeed:
    return SetSpeed(
        max_num_seqs=max_num_seqs, kv_tokens=kv_tokens, base_s=0.007, sequence_s=0.0003, context_s=context_s,
        prefill_token_s=0.0001,
    )  # fmt: skip


def ends_of(jobs: list[Job], engine_speed: SetSpeed) -> tuple[list[float], ModelledEngine]:
    """Return the times at which the modelled engine ends the jobs, from the first arrival's clock on."""
    ends: dict[int, float] = {}

    async def main() -> ModelledEngine:
        loop = asyncio.get_running_loop()
        engine, began = ModelledEngine(engine_speed), loop.time()
        for number, job in enumerate(jobs):

            def ended(number: int = number) -> None:
                ends[number] = loop.time() - began

            sample = Sample(prefix=job.prefix, prompt=job.prompt, tokens=job.tokens, ended=ended, goes_on=job.goes_on)
            loop.call_at(began + job.at, engine.add, [sample])
        while len(ends) < len(jobs):
            await asyncio.sleep(1)
        return engine

    engine = virtual_time.run(main)
    return [ends[number] for number in range(len(jobs))], engine


def jobs_of(seed: int, count: int, prompts: int, longest: int) -> list[Job]:
    """Jobs that arrive one by one in bursts; some share a prompt, as the samples of a group do."""
    draw, at, jobs = random.Random(seed), 0.0, []
    lengths = {f"prompt {number}": draw.randint(1, longest) for number in range(prompts)}
    for _ in range(count):
        at += draw.choice([1e-7, 1e-7, draw.uniform(0, 0.5)])  # timers of one time have no order
        prefix = draw.choice(list(lengths))
        jobs.append(Job(at, prefix, lengths[prefix], draw.randint(1, longest)))
    return jobs


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("kv_tokens", "context_s"), [(100_000, 0.0), (100_000, 1e-5), (700, 1e-5), (450, 0.0)], ids=str
)
def test_it_ends_each_sample_when_a_count_step_by_step_does(seed: int, kv_tokens: int, context_s: float) -> None:
    set_speed = speed(kv_tokens, context_s=context_s)
    jobs = jobs_of(seed, count=60, prompts=20, longest=200)
    ends, engine = ends_of(jobs, set_speed)
    reference = StepwiseEngine(set_speed)
    reference.run(jobs)
    assert ends == pytest.approx([job.ended_at for job in jobs], abs=1e-6)
    assert engine.counts.made == sum(job.tokens for job in jobs)
    assert engine.counts.found == reference.found
    assert engine.counts.preemptions == reference.preemptions


def test_a_short_cache_preempts_and_a_large_one_does_not() -> None:
    jobs = jobs_of(1, count=60, prompts=20, longest=200)
    assert ends_of(jobs, speed(450))[1].counts.preemptions > 0
    assert ends_of(jobs, speed(100_000))[1].counts.preemptions == 0


@pytest.mark.parametrize("kv_tokens", [10_000, 270, 220])
def test_a_session_finds_its_turns_in_the_cache_as_far_as_they_fit(kv_tokens: int) -> None:
    turns = [Job(number * 10.0, "session", 50 + 60 * number, 40, goes_on=True) for number in range(3)]
    others = [Job(number * 10.0 + 5, f"other {number}", 100, 50) for number in range(3)]
    jobs, reference = [*turns, *others], StepwiseEngine(speed(kv_tokens))
    ends, engine = ends_of(jobs, speed(kv_tokens))
    reference.run(jobs)
    assert ends == pytest.approx([job.ended_at for job in jobs], abs=1e-6)
    assert engine.counts.found == reference.found
    assert (reference.found == 90 + 150) == (kv_tokens == 10_000)


def test_a_sample_that_is_stopped_goes_on_where_it_was_and_others_are_not_held_up() -> None:
    ends: dict[str, float] = {}

    async def main() -> tuple[int, ModelledEngine]:
        loop = asyncio.get_running_loop()
        engine, began = ModelledEngine(speed()), loop.time()

        def sample(name: str, made: int = 0) -> Sample:
            return Sample(
                prefix=name, prompt=10, tokens=100, made=made, ended=lambda: ends.update({name: loop.time() - began})
            )

        stopped, other, waiting = sample("stopped"), sample("other"), sample("waiting")
        engine.add([stopped, other])
        await asyncio.sleep(0.2)
        engine.add([waiting])
        engine.stop([stopped, waiting])
        engine.stop([])
        made = stopped.made
        await asyncio.sleep(5)
        engine.add([sample("rest", made)])
        await asyncio.sleep(5)
        return made, engine

    made, engine = virtual_time.run(main)
    assert 0 < made < 100
    assert set(ends) == {"other", "rest"}
    assert engine.counts.made == 200
    assert engine.kv.used == 0
