"""The modelled engine beside the simulated engine, both in virtual time."""

import asyncio

import pytest

from engines.config import EngineConfig
from sim.model import SimModel
from sim.scheduler import Sample as Simulated
from sim.scheduler import SimScheduler, block_hashes
from tuning.plan.gpu import GPUS
from tuning.simulate import virtual_time
from tuning.simulate.engine import ModelledEngine, Sample
from tuning.simulate.speed import speed_of

SIM = {"decode_step_s": 0.01, "decode_step_per_seq_s": 0.0002, "prefill_tokens_per_s": 10_000, "kv_tokens": 20_000}
ENGINE = EngineConfig.model_validate({"kind": "sim", "max_num_seqs": 16, "sim": SIM})


def _simulated(prompt: int, length: int, number: int) -> Simulated:
    tokens = [3 + number % 900] * prompt
    return Simulated(
        request_id=str(number), index=0, prompt=tokens, context=number, draw=number, max_tokens=length, min_tokens=0,
        ignore_eos=True, prompt_blocks=block_hashes(tokens, str(number)), reads_cache=True, report_every=10**6,
        report_at=10**6, reports=asyncio.Queue(),
    )  # fmt: skip


async def _simulated_s(work: list[tuple[int, int]]) -> float:
    began = asyncio.get_running_loop().time()
    scheduler = SimScheduler(ENGINE.sim, SimModel.of(ENGINE.sim), ENGINE.max_num_seqs)
    samples = [_simulated(prompt, length, number) for number, (prompt, length) in enumerate(work)]
    running = asyncio.create_task(scheduler.run())
    scheduler.add(samples)
    for sample in samples:
        await sample.reports.get()
    running.cancel()
    return asyncio.get_running_loop().time() - began


async def _modelled_s(work: list[tuple[int, int]]) -> float:
    loop = asyncio.get_running_loop()
    began, left = loop.time(), asyncio.Semaphore(0)
    engine = ModelledEngine(speed_of("engine", ENGINE, GPUS["H200"], None, 0))
    engine.add(
        Sample(prefix=number, prompt=prompt, tokens=length, ended=left.release)
        for number, (prompt, length) in enumerate(work)
    )
    for _ in work:
        await left.acquire()
    return loop.time() - began


@pytest.mark.parametrize(
    "work",
    [
        [(100, 50)],
        [(100 + 10 * number, 50 + 7 * number) for number in range(16)],
        [(200, 20 + 13 * (number % 20)) for number in range(64)],
        [(900, 600) for _ in range(32)],  # more than the cache holds
    ],
    ids=["one", "a batch", "more than run at once", "preempted"],
)
def test_both_take_the_same_time(work: list[tuple[int, int]]) -> None:
    simulated_s = virtual_time.run(lambda: _simulated_s(work))
    modelled_s = virtual_time.run(lambda: _modelled_s(work))
    print(f"simulated engine {simulated_s:.3f} s, model {modelled_s:.3f} s")
    assert modelled_s == pytest.approx(simulated_s, rel=0.05)
