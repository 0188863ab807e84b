"""The whole loop on one machine: real vLLM replicas on Ray Serve, TRL's own GRPOTrainer, weights synced each step.

    python -m examples.demo            # or: make demo

Starts the fleet as `rollout-gateway up` does, runs `examples.train_sort` against its URL, shows a line per step, draws
a picture, and stops everything, also on Ctrl-C.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines.process.port import free_port
from examples.picture import draw
from gateway.cli.cluster.progress import Report
from gateway.cli.down import down
from gateway.cli.up import up
from gateway.config.load import load
from gateway.config.schema import Config

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "tiny-cpu.yaml"
MODEL = ROOT / "examples" / "tiny_model" / "digit-sort"
NAME = "rollout-gateway-demo"

_POLL_S = 0.05
_STATUS_TIMEOUT_S = 5.0
_TRAINER_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of one replica at a moment. `at_s` counts from the start of the training."""

    at_s: float
    replica_id: str
    state: str
    weight_version: int | None
    samples_in_flight: int


@dataclass(slots=True)
class Story:
    """The data of the picture and the summary.

    A step is a line of `examples.train_sort` with `at_s` added, and `update`, the gateway's record of its weight sync.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)


def main() -> int:
    args = _parse_arguments()
    console = Console()
    # `kill` ends the demo like Ctrl-C, with everything stopped. A shell may have set SIGINT to ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _run(args, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    began = time.monotonic()
    with _fleet(_config(args)) as url:
        console.print(f"fleet ready after {time.monotonic() - began:.0f} s at [bold]{url}[/bold]")
        console.print(f"watch it at [bold]{url}/dashboard[/bold]")
        story = Story()
        with _watching(url, story):
            code = _train(url, args, story, console)
        last = _status(url)
    if code != 0 or not story.steps:
        console.print(f"[red]the trainer ended with {code}[/red]; its log is {args.out / 'trainer.log'}")
        return code or 1
    picture = args.out / "demo.png"
    draw(story.steps, story.sights, picture)
    _summarise(story, last, console)
    console.print(f"picture {picture}    took {time.monotonic() - began:.0f} s")
    return 0


def _config(args: argparse.Namespace) -> Config:
    """Return the example's configuration with free ports."""
    overrides = [f"name={NAME}", "gateway.port=0", f"serve.http_port={free_port()}", f"engine.model={MODEL}"]
    return load(CONFIG, [*overrides, f"engine.log_dir={args.out.resolve() / 'engines'}", *args.overrides])


@contextmanager
def _fleet(config: Config) -> Iterator[str]:
    """Run the fleet; yield its URL."""
    found = up(config, Report())
    try:
        yield found.rollout_url
    finally:
        # A second Ctrl-C must not leave half a fleet behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        down(config.name, Report())


@contextmanager
def _watching(url: str, story: Story) -> Iterator[None]:
    """Record the state of each replica while the block runs."""
    began, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            try:
                replicas = _status(url)["replicas"]
            except OSError:
                continue  # a busy machine; the picture has a gap there
            at_s = time.monotonic() - began
            story.sights += [
                Sight(at_s, r["replica_id"], r["state"], r["weight_version"], r["samples_in_flight"]) for r in replicas
            ]

    watcher = threading.Thread(target=watch, name="watch")
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _train(url: str, args: argparse.Namespace, story: Story, console: Console) -> int:
    """Run the trainer to its end; return its exit code."""
    command = [sys.executable, "-m", "examples.train_sort", "--url", url, "--out", str(args.out / "model")]
    command += ["--steps", str(args.steps), "--seed", str(args.seed), *(["--no-sync"] if args.no_sync else [])]
    began = time.monotonic()
    with (args.out / "trainer.log").open("w") as log, _progress(console, args.steps) as (progress, task):
        # One thread: more would spin against the engines on the same cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        trainer = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                log.write(line)
                if line.startswith('{"step"'):
                    step = json.loads(line)
                    update = _update(url, step["weight_version"])
                    story.steps.append({**step, "at_s": time.monotonic() - began, "update": update})
                    progress.console.print(_line(story.steps[-1]), highlight=False, soft_wrap=True)
                    progress.update(task, completed=len(story.steps))
            return trainer.wait()
        finally:
            _end(trainer)


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[tuple[Progress, Any]]:
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress, progress.add_task("training", total=steps)


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TRAINER_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _line(step: dict[str, Any]) -> str:
    return (
        f"step {step['step']:3d}  reward {step['reward']:.3f}  length {step['completion_tokens']:5.2f}  "
        f"version {step['weight_version']} {_verification(step['update'])}  sync {step['sync_s']:.2f} s  "
        f"{step['tokens_per_s']:5d} tokens/s  ratio {step['importance_ratio']:.5f}"
    )


def _verification(update: dict[str, Any] | None) -> str:
    """Return the canary's verdict on all replicas, and the change of their log-probs in nats per token."""
    if update is None:
        return "not synced"
    canaries = [replica["canary"] for replica in update["replicas"].values() if "canary" in replica]
    results = sorted({canary["result"] for canary in canaries})
    moved = max((canary["to_previous"] for canary in canaries if "to_previous" in canary), default=None)
    said = f"{len(canaries)}x {' and '.join(results)}" if canaries else "not verified"
    return f"{said} in {update['seconds'].get('canary', 0.0):.2f} s" + (f", moved {moved:.3f}" if moved else "")


def _update(url: str, version: int | None) -> dict[str, Any] | None:
    """Return the gateway's record of the update that made `version`."""
    updates = _get(f"{url}/v1/weight_updates")["weight_updates"]
    return next((update for update in updates if update["version"] == version), None)


def _summarise(story: Story, status: dict[str, Any], console: Console) -> None:
    first, last = mean_reward(story.steps[:4]), mean_reward(story.steps[-8:])
    versions = {replica["replica_id"]: replica["weight_version"] for replica in status["replicas"]}
    table = Table(title="rollout-gateway demo", show_header=False)
    table.add_row("mean reward, first 4 steps", f"{first:.3f}")
    table.add_row("mean reward, last 8 steps", f"{last:.3f}  ({last - first:+.3f})")
    table.add_row(
        "importance ratio, furthest from 1", f"{max(abs(s['importance_ratio'] - 1) for s in story.steps):.1e}"
    )
    table.add_row("weight sync, median", f"{statistics.median(s['sync_s'] for s in story.steps):.3f} s")
    updates = [step["update"] for step in story.steps if step["update"]]
    for name in ("transfer", "store", "drain", "load", "digests", "commit", "canary"):
        if seconds := [update["seconds"][name] for update in updates if name in update["seconds"]]:
            table.add_row(f"  of which {name}", f"{statistics.median(seconds):.3f} s")
    table.add_row(
        "tokens/s while generating, median", f"{statistics.median(s['tokens_per_s'] for s in story.steps):.0f}"
    )
    for replica_id, version in versions.items():
        table.add_row(f"replica {replica_id}", f"weight version {version}")
    console.print(table)


def mean_reward(steps: list[dict[str, Any]]) -> float:
    return statistics.fmean(step["reward"] for step in steps)


def _status(url: str) -> dict[str, Any]:
    return _get(f"{url}/status")


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=_STATUS_TIMEOUT_S) as response:
        report: dict[str, Any] = json.load(response)
        return report


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="folder for picture, model and logs")
    parser.add_argument("--no-sync", action="store_true", help="never send weights: the reward stays flat")
    args, overrides = parser.parse_known_args()
    args.overrides = overrides
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
