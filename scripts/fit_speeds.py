"""Fits the constants of `rollout-gateway plan` to part of the measured rows, and reports its predictions of the others.

    python -m scripts.fit_speeds            # report predictions of the current constants
    python -m scripts.fit_speeds --write    # fit again, and write tuning/plan/fitted.json and docs/plan.md

The rows are those of docs/results/. Those that are held out take no part in the fit.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.shapes import SHAPES
from tuning.plan.gpu import GPUS
from tuning.plan.shape import ModelShape, shape_of
from tuning.plan.speed import LARGEST_GRAPH, EngineModel, Speeds, rollout
from tuning.plan.workload import Lengths, StepWorkload

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plan.md"
FITTED = ROOT / "tuning" / "plan" / "fitted.json"
_BEGIN, _END = "<!-- rows: python -m scripts.fit_speeds --write -->\n", "<!-- end of rows -->\n"
_RESULTS = ROOT / "docs" / "results"
_DAY = "2026-11-21-"
# Start of the search: shares of the data sheet's limits, seconds, and the slowdown of the slow day's cores.
_START = (0.7, 0.65, 1.5e-3, 4e-4, 8e-6, 35e-6, 5e-4, 1.4)
# Weak: it bounds constants that few rows depend on.
_PULL_TO_START = 0.006
_ROUNDS = 40
_STILL = 1e-4  # largest logarithmic step at convergence
_PLENTY = 1e9  # tokens of KV cache: no row was limited by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: tokens/s of one replica."""

    name: str
    file: str
    measured: float
    work: StepWorkload
    shape: str = "qwen2-7b"
    tensor_parallel: int = 1
    max_num_seqs: int = 1024
    api_servers: int = 1
    graph_seqs: int = LARGEST_GRAPH
    slow_cores: bool = False
    fits: bool = False
    """Whether the constants are fitted to it."""


def rows() -> list[Row]:
    """All measured rows of vLLM."""
    return [*_lengths(), *_compared(), *_levers()]


def predicted(row: Row, speeds: Speeds, slow_factor: float) -> float:
    """Return the row's tokens/s predicted by the model."""
    engine = EngineModel(
        shape=_shape(row.shape),
        gpu=GPUS["H200"],
        tensor_parallel=row.tensor_parallel,
        max_num_seqs=row.max_num_seqs,
        kv_tokens=_PLENTY,
        api_servers=row.api_servers,
        graph_seqs=row.graph_seqs,
        cpu_factor=slow_factor if row.slow_cores else 1.0,
        speeds=speeds,
    )
    return rollout(engine, row.work).tokens_per_s


def page() -> str:
    """Return docs/plan.md with the current constants and rows."""
    kept = json.loads(FITTED.read_text(encoding="utf-8"))
    speeds, slow_factor = Speeds(**kept["speeds"]), kept["slow_cores"]
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    constants = "\n".join(f"| `{name}` | {value:.3g} |" for name, value in dataclasses.asdict(speeds).items())
    constants += f"\n| CPU cores of the slow host (`--cpu-factor`) | {slow_factor:.3g} |"
    made = f"\n| constant | value |\n| --- | --- |\n{constants}\n\n{table(speeds, slow_factor)}\n"
    return head + _BEGIN + made + _END + rest.partition(_END)[2]


def fit(measured: Sequence[Row]) -> tuple[Speeds, float]:
    """Least squares of the logarithms (Levenberg-Marquardt), so that 10 % count the same in every row."""
    start = np.log(_START)

    def residuals(point: np.ndarray) -> np.ndarray:
        speeds, slow_factor = _constants(point)
        misses = [np.log(predicted(row, speeds, slow_factor) / row.measured) for row in measured]
        return np.concatenate([misses, _PULL_TO_START * (point - start)])

    point, damping, found = start, 1e-2, residuals(start)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(point + nudge) - found) / 1e-4 for nudge in 1e-4 * np.eye(len(point))], axis=1)
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(point)), -slopes.T @ found)
        if np.abs(step).max() < _STILL:
            break
        tried = residuals(point + step)
        if (tried**2).sum() < (found**2).sum():
            point, found, damping = point + step, tried, max(damping / 2, 1e-7)
        else:
            damping *= 3
    return _constants(point)


def table(speeds: Speeds, slow_factor: float) -> str:
    """Every row, measured and predicted, in Markdown."""
    lines = [
        "| row | model | TP | load per replica | measured, tok/s | predicted | ratio | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows():
        guess = predicted(row, speeds, slow_factor)
        use = "fitted" if row.fits else "held out"
        load = f"{row.work.prompts} x {row.work.samples}, {row.work.prompt.longest} in, {row.work.response.longest} out"
        cells = (row.name, row.shape, row.tensor_parallel, load, f"{row.measured:,.0f}", f"{guess:,.0f}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{guess / row.measured:.2f}", use))) + " |")
    return "\n".join(lines)


def _constants(point: np.ndarray) -> tuple[Speeds, float]:
    *speeds, slow_factor = map(float, np.exp(point))
    names = [field.name for field in dataclasses.fields(Speeds)]
    return Speeds(**dict(zip(names, speeds, strict=True))), slow_factor


def _shape(name: str) -> ModelShape:
    return shape_of(SHAPES[name], name)


def _work(prompts: int, samples: int, prompt_tokens: int, max_tokens: int) -> StepWorkload:
    prompt, response = Lengths(prompt_tokens, prompt_tokens), Lengths(max_tokens, max_tokens)
    return StepWorkload(prompts=prompts, samples=samples, prompt=prompt, response=response)


def _load(load: str, prompt_tokens: int, max_tokens: int, replicas: int = 1) -> StepWorkload:
    """`512` is as many prompts, `64x8` prompts of several samples; one replica may have the load of several GPUs."""
    prompts, _, samples = load.partition("x")
    return _work(int(prompts) * replicas, int(samples or 1), prompt_tokens, max_tokens)


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"{_DAY}{name}.json").read_text(encoding="utf-8"))


def _lengths() -> Iterator[Row]:
    name = "h200-vllm-0.26-qwen2-7b-lengths"
    for row in _read(name)["rows"]:
        work = _work(row["prompts"], row["samples"], row["prompt_tokens"], row["max_tokens"])
        fits = row["load"] != "64x8"
        yield Row(name=f"{row['load']} streams", file=name, measured=row["tokens_per_s"], work=work, fits=fits)


def _compared() -> Iterator[Row]:
    """Engines driven directly, whole replies."""
    for name, host in (
        ("h200-vllm-0.26-qwen2-7b-1x", "one"),
        ("h200-vllm-0.26-qwen2-7b-2x", "two"),
        ("h200x4-vllm-0.26-qwen2-7b-1x", "one of four"),
        ("h200x4-vllm-0.26-qwen2-7b-4x", "four"),
        ("h200x4-vllm-0.26-qwen2-7b-1x-groups-streamed", "one of four, later"),
        ("h200x4-vllm-0.26-qwen2-7b-4x-groups-streamed", "four, later"),
    ):
        found = _read(name)
        for line in found["summary"]:
            if line["side"] == "direct":
                yield Row(
                    name=f"{host}: {line['load']}",
                    file=name,
                    measured=line["tokens_per_s"] / found["engines"],
                    work=_load(line["load"], 256, 256),
                    fits=host == "one",
                )


def _levers() -> Iterator[Row]:
    """Single settings of an engine, in waves of several engines and their clients on slow cores."""
    wave = "h200x4-vllm-0.26-levers-"
    variants: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("graphs-seqs", "graphs, 1024 seqs", {"fits": True}),
        ("graphs-seqs", "eager", {"graph_seqs": 0}),
        ("graphs-seqs", "256 seqs", {"max_num_seqs": 256}),
        ("graphs-seqs", "64 seqs", {"max_num_seqs": 64}),
        ("batched-tokens", "default", {}),
        ("tp", "two TP1", {}),
        ("tp", "one TP2", {"tensor_parallel": 2}),
        ("api-servers", "1", {"shape": "qwen2-0.5b"}),
        ("api-servers", "2", {"shape": "qwen2-0.5b", "api_servers": 2}),
        ("api-servers", "4", {"shape": "qwen2-0.5b", "api_servers": 4}),
    )
    for file, variant, change in variants:
        found = _read(f"{wave}{file}")
        for line in found["summary"]:
            if line["variant"] != variant:
                continue
            gpus = change.get("tensor_parallel", 1)
            row = Row(
                name=f"{file}, {variant}: {line['load']}",
                file=f"{wave}{file}",
                measured=line["tokens_per_s_per_gpu"] * gpus,
                work=_load(line["load"], int(found["prompt_tokens"]), found["max_tokens"], gpus),
                slow_cores=True,
                **change,
            )
            yield dataclasses.replace(row, fits=row.fits or row.name in _ALSO_FITTED)


# Rows for steps without a CUDA graph, long prompts, the API process, and launch-bound steps.
_ALSO_FITTED = (
    "graphs-seqs, eager: 64",
    "batched-tokens, default: 64",
    "tp, one TP2: 512",
    "tp, one TP2: 64x8",
    "api-servers, 1: 64",
    "api-servers, 1: 512",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fit_speeds", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"fit again and write {FITTED.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    if args.write:
        speeds, slow_factor = fit([row for row in rows() if row.fits])
        found = {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(speeds).items()}
        kept = {"speeds": found, "slow_cores": float(f"{slow_factor:.4g}")}
        kept["fitted_to"] = [f"{row.file} {row.name}" for row in rows() if row.fits]
        FITTED.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(page(), encoding="utf-8")
    kept = json.loads(FITTED.read_text(encoding="utf-8"))
    print(table(Speeds(**kept["speeds"]), kept["slow_cores"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
