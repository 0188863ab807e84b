"""The side-by-side benchmark: who is driven with what, what the rows say, and one short run of it all."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.config import SimConfig
from engines.types import ReplicaInfo
from gateway.config import Config
from gateway.listener import Listener
from loadtests.compare import Load, Run, Side, Targets, process_cpu_s, streams_of, summary, table
from loadtests.workloads import LengthMix, Workload
from tests.rig import SimReplica

TARGETS = Targets(gateway="http://gateway", engines=("http://a", "http://b"))


def load(name: str = "4", *, streams: int = 4, prompts: int = 1, samples: int = 1, is_batch: bool = False) -> Load:
    workload = Workload(prompts=prompts, samples=samples, prompt_tokens=LengthMix.parse("8"), max_tokens=8)
    return Load(name=name, streams=streams, is_batch=is_batch, rounds=2, workload=workload)


def run(side: Side, pair: int, tokens: int, *, cpu_s: float | None = None, errors: int = 0) -> Run:
    return Run(
        load="4",
        side=side,
        pair=pair,
        wall_s=2.0,
        completions=1,
        tokens=tokens,
        median_latency_s=1.0,
        p99_latency_s=2.0,
        gateway_cpu_s=cpu_s,
        client_busy=0.1,
        errors=["lost"] * errors,
    )


def test_direct_streams_are_dealt_out_over_the_engines() -> None:
    streams = streams_of(load(), Side.DIRECT, TARGETS, "seed")
    assert [stream.url for stream in streams] == ["http://a", "http://b"] * 4
    assert {stream.url for stream in streams_of(load(), Side.GATEWAY, TARGETS, "seed")} == {"http://gateway"}
    assert len(streams_of(load(), Side.GATEWAY, TARGETS, "seed")) == len(streams)


def test_a_batch_is_one_request_for_each_engine_and_one_for_the_gateway() -> None:
    batch = load(streams=1, prompts=16, samples=8, is_batch=True)
    assert [stream.workload.prompts for stream in streams_of(batch, Side.STREAMED, TARGETS, "seed")] == [16, 16]
    assert [stream.workload.prompts for stream in streams_of(batch, Side.GATEWAY, TARGETS, "seed")] == [32]


def test_no_two_requests_have_the_same_prompts() -> None:
    seeds = [seed for stream in streams_of(load(), Side.DIRECT, TARGETS, "seed") for seed in stream.seeds]
    assert len(set(seeds)) == len(seeds) == 16


def test_rows_say_how_the_gateway_compares() -> None:
    runs = [run(Side.DIRECT, pair, 1000) for pair in range(5)]
    runs += [run(Side.GATEWAY, pair, 990 + pair, cpu_s=0.5) for pair in range(5)]
    rows = summary(runs, [load()], [Side.DIRECT, Side.GATEWAY])
    assert [row["side"] for row in rows] == ["direct", "gateway"]
    assert rows[0]["tokens_per_s"] == 500
    assert rows[1]["ratios"]["direct"]["median"] == pytest.approx(0.992)
    assert rows[1]["ratios"]["direct"]["lower_bound_95"] == pytest.approx(0.990)
    assert rows[1]["gateway_cores"] == 0.25
    assert rows[1]["gateway_cpu_s_per_million_tokens"] == pytest.approx(504, rel=0.01)
    assert "0.992 >= 0.990" in table(rows)


def test_a_side_that_delivered_nothing_has_no_ratio() -> None:
    runs = [run(Side.DIRECT, 0, 0, errors=3), run(Side.GATEWAY, 0, 1000)]
    rows = summary(runs, [load()], [Side.DIRECT, Side.GATEWAY])
    assert rows[0]["errors"] == 3
    assert rows[1]["ratios"] == {}
    assert table(rows)


def test_cpu_time_of_a_process() -> None:
    before = process_cpu_s(os.getpid())
    sum(range(3_000_000))
    assert process_cpu_s(os.getpid()) > before


@pytest.fixture
async def replicas() -> AsyncIterator[list[SimReplica]]:
    sim = SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)
    started = [await SimReplica(f"engine-{index}", index, sim).start() for index in range(2)]
    yield started
    for replica in started:
        await replica.kill()


@pytest.fixture
async def gateway_url(replicas: list[SimReplica]) -> AsyncIterator[str]:
    async def discover() -> list[ReplicaInfo]:
        return [replica.info for replica in replicas]

    tree = {"gateway": {"port": 0}, "engine": {"kind": "sim", "num_replicas": 2}}
    listener = Listener(Config.model_validate(tree), discover)
    # In a thread: it asks the replicas, which answer on this loop.
    yield await asyncio.to_thread(listener.start)
    await asyncio.to_thread(listener.stop)


async def test_a_short_run(replicas: list[SimReplica], gateway_url: str, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    command = [sys.executable, "-m", "loadtests.compare", "--gateway", gateway_url, "--gateway-pid", str(os.getpid())]
    for replica in replicas:
        command += ["--engine", replica.info.url]
    command += ["--streams", "4", "--batch", "3x2", "--prompt-tokens", "8", "--max-tokens", "8", "--pairs", "2"]
    command += ["--clients", "1", "--sides", *Side, "--json", str(report)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    told = json.loads(report.read_text())
    assert {(run["load"], run["side"]): run["tokens"] for run in told["runs"]} == {
        **{("4", side.value): 2 * 4 * 8 for side in Side},
        **{("3x2", side.value): 2 * 3 * 2 * 8 for side in Side},
    }
    assert [run["side"] for run in told["runs"][:4]] == list(Side)
    assert [run["side"] for run in told["runs"][8:12]] == list(reversed(Side))
    assert all(row["pairs"] == 2 for row in told["summary"])
    assert b"gateway-streamed" in printed
