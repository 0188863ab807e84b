"""Traces read again: what prompts are made of, what is passed over, and a replay of what a gateway recorded."""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.config.schema import TraceConfig
from gateway.http.trace import Arrival, Trace
from loadtests.traces import Recorded, TraceError, read_trace
from loadtests.workloads import Json
from tests.loadtests.locust_runs import locust
from tests.rigs.rig import Rig, StartRig

PREFIX = list(range(3, 67))
USAGE = {"prompt_tokens": 70, "completion_tokens": 12}


def recorded(path: Path, *requests: tuple[Json, str], content: bool = False, status: int = 200) -> list[Recorded]:
    """A recorded trace of requests that came a second apart."""
    trace = Trace(TraceConfig(file=str(path), content=content))
    for second, (body, session) in enumerate(requests):
        trace.ended(Arrival("/v1/completions", body, session, 1000.0 + second, 0.0), status, USAGE)
    trace.close()
    return read_trace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_shared_prefixes_are_shared_again(path: Path) -> None:
    first, second, third = (
        one.prompts[0]
        for one in recorded(
            path, ({"prompt": [*PREFIX, 1, 2]}, ""), ({"prompt": [*PREFIX, 8, 9]}, ""), ({"prompt": PREFIX[::-1]}, "")
        )
    )
    assert [len(prompt) for prompt in (first, second, third)] == [66, 66, 64]
    assert first[:64] == second[:64] != third
    assert first[64:] != second[64:]
    assert first[:64] != PREFIX  # nobody's tokens


def test_what_is_no_trace_is_refused_by_line(path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(path)
    with pytest.raises(TraceError, match="no request in it was answered"):
        recorded(path, ({"prompt": PREFIX}, ""), status=400)
    path.write_text('{"at": 1}\n')
    with pytest.raises(TraceError, match=r"trace.jsonl, line 1: not a line of a trace"):
        read_trace(path)


@pytest.fixture
async def rig(start_rig: StartRig, path: Path) -> Rig:
    """It has answered six requests, two of them turns of a session, in half a second or more."""
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, gateway={"trace": {"file": str(path)}})
    for index in range(6):
        await rig.complete([*PREFIX, index], n=2, max_tokens=9, ignore_eos=True, **({} if index < 4 else {"user": "u"}))
    return rig


async def lines(path: Path, count: int) -> list[Json]:
    """The requests of a trace, as soon as so many are there: a thread of the gateway's writes them."""
    async with asyncio.timeout(20):
        while True:
            found = [line for line in map(json.loads, text(path).splitlines()) if "trace" not in line]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)


def text(path: Path) -> str:
    return path.read_text()


@pytest.mark.load
@pytest.mark.parametrize("options", [["--speed", "2"], ["--processes", "2"]])
async def test_a_recorded_run_is_asked_again(rig: Rig, path: Path, tmp_path: Path, options: list[str]) -> None:
    before = await lines(path, 6)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())  # noqa: ASYNC240  # a small file
    ended = await locust("replay", rig.url, tmp_path, "--trace", str(copy), "--model", "sim", *options)
    assert ended.code == 0, ended.said
    assert (ended.figures["completions"], ended.figures["tokens.sum"]) == (12, 12 * 9)
    assert "lateness_s.count" in ended.figures
    again = (await lines(path, 12))[6:]
    assert sorted(line["prompts"][0]["tokens"] for line in again) == [65] * 6
    assert {line["prompts"][0]["blocks"][0] for line in again} != {before[0]["prompts"][0]["blocks"][0]}
    assert len({line["prompts"][0]["blocks"][0] for line in again}) == 1
    assert sum(line["session"] is not None for line in again) == 2
