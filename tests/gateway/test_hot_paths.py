"""The tables of both hot paths in docs/architecture.md, compared with the functions that run."""

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

ROOT = Path(__file__).parents[2]
OVERVIEW = ROOT / "docs" / "architecture.md"
ELSEWHERE = ("sim/", "engines/inside_vllm/")
"""Run in an engine's process: no part of the gateway's path here."""

ROLLOUT = ("RolloutRoutes._create_completions", "ReaderServer._answer")
"""Where a rollout begins, in the gateway and beside its engine."""
BESIDE = "engines/reading/server.py"
"""Runs beside the engine."""
MESSAGE = "Wire.data_received"
"""Where a message comes, in no task."""

Function = tuple[str, str]
"""File and qualified name."""


class HotPath:
    """A section of the overview: its table's functions."""

    def __init__(self, heading: str) -> None:
        _, _, rest = OVERVIEW.read_text(encoding="utf-8").partition(f"## {heading}\n")
        section = rest.partition("\n## ")[0]
        rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| ([^|]+) \|$", section, re.MULTILINE)
        self.functions = {(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)}
        self.num_steps = len(rows)


class Calls:
    """Functions of ours that were called in tasks that served a route, in tasks that these began, or by a message."""

    def __init__(self) -> None:
        self._called: dict[asyncio.Task[Any] | None, set[Function]] = {}
        self._by_messages: set[Function] = set()
        self._parents: dict[asyncio.Task[Any], asyncio.Task[Any] | None] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            loop.set_task_factory(None)

    def below(self, *routes: str) -> set[Function]:
        begun = {task for task, called in self._called.items() if any(name in routes for _, name in called)}
        below = [called for task, called in self._called.items() if self._is_below(task, begun)]
        return set().union(*below, self._by_messages if ROLLOUT[0] in routes else ())

    def _is_below(self, task: asyncio.Task[Any] | None, begun: set[asyncio.Task[Any] | None]) -> bool:
        while task is not None and task not in begun:
            task = self._parents.get(task)
        return task is not None

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._parents[task] = _current_task()
        return task

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((f"{ROOT}/gateway/", f"{ROOT}/engines/")):
            name = str(Path(file).relative_to(ROOT))
            if not name.startswith(ELSEWHERE):
                task, function = _current_task(), (name, frame.f_code.co_qualname)
                is_by_message = task is None and _is_under(frame, MESSAGE)
                (self._by_messages if is_by_message else self._called.setdefault(task, set())).add(function)


def _is_under(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_qualname != name:
        frame = frame.f_back
    return frame is not None


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a callback of the loop, or a thread
        return None


def _missing(path: HotPath, called: set[Function]) -> set[Function]:
    """Functions of the table that were not called. A class stands for any of its methods."""
    return {
        (file, name)
        for file, name in path.functions
        if not file.startswith(ELSEWHERE)
        and not any(file == other and (f"{ran}.").startswith(f"{name}.") for other, ran in called)
    }


async def _kept(rig: Rig, version: int) -> None:
    """Returns when the store has the version, which is written after the update's end."""
    await until(lambda: rig.get("/status"), lambda got: version in got[1]["weight_store"]["versions"])


async def _complete_after_a_pause(rig: Rig) -> None:
    await rig.post("/pause?mode=keep")
    waiting = asyncio.create_task(rig.complete([4, 5, 6]))
    await rig.in_line()
    await rig.post("/resume")
    await waiting


@pytest.fixture
def rollout() -> HotPath:
    return HotPath("Follow one rollout")


@pytest.fixture
def update() -> HotPath:
    return HotPath("Follow one weight update")


def test_a_path_has_few_steps(rollout: HotPath, update: HotPath) -> None:
    assert 0 < rollout.num_steps <= 9
    assert 0 < update.num_steps <= 9


async def test_a_completion_passes_few_functions_of_few_files_in_the_gateway(start_rig: StartRig) -> None:
    """One of eight tokens, when the gateway has answered others."""
    rig, calls = await start_rig(num_replicas=1), Calls()
    await rig.complete([4, 5, 6])
    with calls.recorded():
        await rig.complete([4, 5, 6])
    called = {(file, name) for file, name in calls.below(ROLLOUT[0]) if file != BESIDE}
    assert len(called) <= 120
    assert len({file for file, _ in called}) <= 25


async def test_functions_of_the_rollout_table_are_called(start_rig: StartRig, rollout: HotPath) -> None:
    """By a single sample, one that waits, a group, a stream, and a group whose replica dies."""
    rig, calls = await start_rig(num_replicas=2), Calls()
    with calls.recorded():
        await rig.complete([4, 5, 6])
        await _complete_after_a_pause(rig)
        await rig.complete([4, 5, 6], n=4)
        body = {"model": "sim", "prompt": [4, 5, 6], "max_tokens": 8, "stream": True}
        async with rig.client.post(f"{rig.url}/v1/completions", json=body) as stream:
            assert stream.status == 200
            await stream.read()
        asked = asyncio.create_task(rig.complete([4, 5, 6], n=2, max_tokens=24, ignore_eos=True))
        await rig.begun(samples=2)
        busy = next(replica for replica in rig.replicas if replica.scheduler.stalled)
        await busy.kill()
        rig.hurry()
        await asked
    assert _missing(rollout, calls.below(*ROLLOUT)) == set()


async def test_functions_of_the_update_table_are_called(start_rig: StartRig, update: HotPath, tmp_path: Path) -> None:
    rig, calls = await start_rig(sim={"tensors": {"w": [4, 4]}}, weights={"store": str(tmp_path)}), Calls()
    await rig.open_group()
    await rig.update()
    with calls.recorded():
        await rig.update()
        await _kept(rig, 2)
    called = calls.below("WeightRoutes._start", "WeightRoutes._update", "WeightRoutes._finish")
    assert _missing(update, called) == {("gateway/weights/updates/update.py", "Update.abort")}
