"""The side-by-side benchmark: who is driven with what, what the rows say, and one short run of it all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.studies.compare import Load, Middle, Run, Side, streams_of, summary, table
from loadtests.workloads import LengthMix, Workload

ROUTER = Path(__file__).with_name("played_router.py")
ENGINES = ("http://a", "http://b")


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
        middle_cpu_s=cpu_s,
        client_busy=0.1,
        errors=["lost"] * errors,
    )


def test_a_batch_is_one_request_for_each_engine_and_one_for_the_gateway() -> None:
    batch = load(streams=1, prompts=16, samples=8, is_batch=True)
    assert [stream.workload.prompts for stream in streams_of(batch, None, ENGINES, "seed")] == [16, 16]
    assert [stream.workload.prompts for stream in streams_of(batch, Middle("http://gateway"), ENGINES, "seed")] == [32]


def test_rows_say_how_the_gateway_compares() -> None:
    runs = [run(Side.DIRECT, pair, 1000) for pair in range(5)]
    runs += [run(Side.GATEWAY, pair, 990 + pair, cpu_s=0.5) for pair in range(5)]
    rows = summary(runs, [load()], [Side.DIRECT, Side.GATEWAY])
    assert [row["side"] for row in rows] == ["direct", "gateway"]
    assert rows[0]["tokens_per_s"] == 500
    assert rows[1]["ratios"]["direct"]["median"] == pytest.approx(0.992)
    assert rows[1]["ratios"]["direct"]["lower_bound_95"] == pytest.approx(0.990)
    assert rows[1]["middle_cores"] == 0.25
    assert rows[1]["middle_cpu_s_per_million_tokens"] == pytest.approx(504, rel=0.01)
    assert "0.992 >= 0.990" in table(rows)


@pytest.mark.load
def test_a_short_run(tmp_path: Path) -> None:
    """Four streams and a batch, two pairs, on all sides."""
    report, sides = tmp_path / "out.json", list(Side)
    command = [sys.executable, "-m", "loadtests.fleet", "gateway.port=0", "gateway.ledger=null"]
    command += ["engine.kind=sim", "engine.num_replicas=2", "--", sys.executable, "-m", "loadtests.studies.compare"]
    command += ["--gateway", "{url}", "--gateway-pid", "{pid}", "--engine", "{engines}"]
    command += ["--streams", "4", "--batch", "3x2", "--prompt-tokens", "8", "--max-tokens", "8", "--pairs", "2"]
    command += ["--sides", *sides, "--vllm-router", f"{sys.executable} {ROUTER}", "--json", str(report)]
    ran = subprocess.run([*command, "--clients", "1"], stdout=-1, stderr=-2, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    told = json.loads(report.read_text())
    assert {(run["load"], run["side"]): run["tokens"] for run in told["runs"]} == {
        **{("4", side.value): 2 * 4 * 8 for side in sides},
        **{("3x2", side.value): 2 * 3 * 2 * 8 for side in sides},
    }
    assert [run["side"] for run in told["runs"][:3]] == sides
    assert [run["side"] for run in told["runs"][6:9]] == sides[::-1]
    assert all(row["pairs"] == 2 for row in told["summary"])
    rows = {row["side"]: row for row in told["summary"] if row["load"] == "4"}
    assert set(rows["gateway"]["ratios"]) == {"direct", "vllm-router"}
    assert set(rows["vllm-router"]["ratios"]) == {"direct"}
    # A short run may take less than the hundredth of a second that the kernel counts in.
    assert rows["vllm-router"]["middle_cpu_s_per_million_tokens"] >= 0
    assert "middle_cpu_s_per_million_tokens" not in rows["direct"]
