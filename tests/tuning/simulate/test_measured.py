"""Simulated batches beside those that were measured through the gateway, on one, two and four GPUs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import Config
from loadtests.shapes import SHAPES
from tuning.plan.gpu import GPUS
from tuning.plan.shape import shape_of
from tuning.simulate.placements import by_the_gateway
from tuning.simulate.simulation import simulated
from tuning.simulate.speed import speed_of
from tuning.simulate.workloads.workload import Ask, Workload

RESULTS = Path(__file__).parents[3] / "docs" / "results"
FILES = (
    "2026-11-21-h200-vllm-0.26-qwen2-7b-1x",
    "2026-11-21-h200-vllm-0.26-qwen2-7b-2x",
    "2026-11-21-h200x4-vllm-0.26-qwen2-7b-1x",
    "2026-11-21-h200x4-vllm-0.26-qwen2-7b-4x",
    "2026-11-21-h200x4-vllm-0.26-qwen2-7b-1x-groups-streamed",
    "2026-11-21-h200x4-vllm-0.26-qwen2-7b-4x-groups-streamed",
)


def rows() -> Iterator[Any]:
    """Yield prompts for each GPU, samples, GPUs, and the measured tokens/s and p99 latency."""
    for file in FILES:
        found = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        assert (found["prompt_tokens"], found["max_tokens"]) == ("256", 256)
        for line in found["summary"]:
            if line["side"] == "gateway" and is_steady(line["ratios"]["direct"]["pairs"]):
                prompts, _, samples = line["load"].partition("x")
                measured = line["tokens_per_s"], line["p99_latency_s"]
                load = f"{found['engines']} GPUs, {line['load']}, {file.partition('7b-')[2]}"
                yield pytest.param(int(prompts), int(samples or 1), found["engines"], *measured, id=load)


def is_steady(pairs: list[float]) -> bool:
    """False where runs of the row differ among each other by more than the simulation may."""
    return max(pairs) / min(pairs) < 1.15


@pytest.mark.parametrize(("prompts", "samples", "gpus", "tokens_per_s", "p99_s"), [*rows()])
def test_a_batch_takes_as_long_as_was_measured_within_15_percent(
    prompts: int, samples: int, gpus: int, tokens_per_s: float, p99_s: float
) -> None:
    engine = {"kind": "vllm", "model": "qwen2-7b", "num_replicas": gpus, "max_num_seqs": 1024}
    config = Config.model_validate({"engine": engine})
    speed = speed_of("engine", config.engine, GPUS["H200"], shape_of(SHAPES["qwen2-7b"], "qwen2-7b"), 0)
    batch = [
        [Ask(request="batch", text=text, prefix=text, prompt=256, lengths=(256,) * samples, limit=256)]
        for text in range(prompts * gpus)
    ]
    outcome = simulated(config, {"engine": speed}, Workload([[batch]]), by_the_gateway)
    print(f"simulated {outcome.tokens_per_s / tokens_per_s:.2f} of tokens/s, {outcome.p99_s / p99_s:.2f} of p99")
    assert outcome.tokens_per_s == pytest.approx(tokens_per_s, rel=0.15)
    assert outcome.p99_s == pytest.approx(p99_s, rel=0.15)
