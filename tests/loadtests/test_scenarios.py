"""Every scenario, short, against a gateway over simulated engines; and what is said of servers that fail."""

import asyncio
import csv
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from tests.loadtests.locust_runs import locust
from tests.rig import Rig, StartRig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def rig(start_rig: StartRig, tmp_path: Path) -> Rig:
    return await start_rig(2, sim={"decode_step_s": 0.005}, weights={"store": str(tmp_path / "store")})


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A server of our own in the place of a gateway."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chunk(tokens: int, finish: str | None = None) -> bytes:
    return (
        b"data: "
        + orjson.dumps({"choices": [{"index": 0, "token_ids": [9] * tokens, "finish_reason": finish}]})
        + b"\n\n"
    )


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def test_trainers_with_weight_updates(rig: Rig, tmp_path: Path) -> None:
    ended = await locust(
        "trainer", rig.url, tmp_path, "-u", "2", "-r", "2", "-t", "4s", "--prompts", "3", "--samples", "2",
        "--update-every", "1", "--csv", str(tmp_path / "load"), "--html", str(tmp_path / "load.html"),
    )  # fmt: skip
    assert ended.code == 0, ended.said
    told = ended.figures
    assert told["failures"] == 0
    assert told["completions"] == 6 * told["makespan_s.count"]
    assert told["tokens.sum"] == 6 * told["completions"]
    assert told["update_s.count"] >= 1
    assert told["tail_ratio.min"] >= 1
    # Simulated engines stream every 4 tokens, 5 ms each: a reader of whole blocks would see all six at once.
    assert told["tpot_s.max"] > 0.004
    assert told["ttft_s.p50"] < told["completion_s.p50"]
    with (tmp_path / "load_stats.csv").open() as stats:
        rows = {row["Name"]: row for row in csv.DictReader(stats)}
    assert int(rows["makespan"]["Request Count"]) == told["makespan_s.count"]
    assert rows["Aggregated"]["Request Count"] == rows["/v1/completions"]["Request Count"]
    assert (tmp_path / "load.html").stat().st_size > 0


async def test_a_batch_asked_for_prompt_by_prompt_may_mix_lengths(rig: Rig, tmp_path: Path) -> None:
    options = ["-t", "2s", "--prompts", "4", "--samples", "2", "--max-tokens", "4*3,40*1"]
    ended = await locust("trainer", rig.url, tmp_path, *options, "--ask", "prompt")
    assert ended.code == 0, ended.said
    assert (ended.figures["completion_tokens.min"], ended.figures["completion_tokens.max"]) == (4, 40)
    assert ended.figures["tail_ratio.min"] > 1
    refused = await locust("trainer", rig.url, tmp_path, *options)
    assert refused.code == 1
    assert "use --ask prompt" in refused.said


async def test_whole_replies_tell_the_makespan_alone(rig: Rig, tmp_path: Path) -> None:
    ended = await locust("trainer", rig.url, tmp_path, "-t", "1s", "--prompts", "2", "--samples", "2", "--ask", "whole")
    assert ended.code == 0, ended.said
    assert ended.figures["makespan_s.count"] >= 1
    assert "ttft_s.count" not in ended.figures


async def test_agents_in_two_processes(rig: Rig, tmp_path: Path) -> None:
    options = ["-u", "4", "-r", "4", "-t", "4s", "--turns", "3", "--tool-gap", "0.01", "--tool-tokens", "4"]
    ended = await locust("agents", rig.url, tmp_path, *options, "--processes", "2")
    assert ended.code == 0, ended.said
    assert ended.figures["session_s.count"] >= 1
    assert ended.figures["later_turn_s.count"] >= 2 * ended.figures["session_s.count"]


async def test_a_session_ends_before_its_context_is_full(rig: Rig, tmp_path: Path) -> None:
    options = ["-t", "1s", "--turns", "9", "--tool-gap", "0", "--tool-tokens", "4", "--max-context", "24"]
    ended = await locust("agents", rig.url, tmp_path, *options)
    assert ended.code == 0, ended.said
    assert ended.figures["later_turn_s.count"] == pytest.approx(ended.figures["session_s.count"], abs=1)


async def test_a_spike_is_told_of_by_itself(rig: Rig, tmp_path: Path) -> None:
    ended = await locust("spike", rig.url, tmp_path, "-u", "1", "-t", "6s", "--rate", "8", "--spike", "6")
    assert ended.code == 0, ended.said
    told = ended.figures
    assert told["spike.completions"] > max(told["calm.completions"], told["after.completions"])
    assert told["spike.ttft_s.p99"] > 0


@pytest.mark.slow
async def test_a_soak_tells_what_drifts(rig: Rig, tmp_path: Path) -> None:
    options = ["-t", "8s", "--rate", "4", "--prompts", "2", "--samples", "2", "--turns", "2", "--tool-gap", "0.05"]
    ended = await locust("soak", rig.url, tmp_path, *options, "--watch-pid", "1", "--update-every", "2")
    assert ended.code == 0, ended.said
    told = ended.figures
    assert told["drift.ttft_s.p50"] > 0
    assert all(told[f"{name}.count"] for name in ("makespan_s", "session_s", "lateness_s", "update_s", "watched_mib"))


async def test_waiting_counts_from_when_a_request_was_due(tmp_path: Path) -> None:
    """One answer at a time, 0.2 s each, to 20 requests a second: the queue, and with it the wait, only grows."""
    turn = asyncio.Lock()

    async def slow(request: web.Request) -> web.StreamResponse:
        async with turn:
            await asyncio.sleep(0.2)
        response = await streamed(request)
        await response.write(chunk(6, "length") + b"data: [DONE]\n\n")
        return response

    async with server(slow) as url:
        ended = await locust("open_loop", url, tmp_path, "-t", "2s", "--rate", "20")
    assert ended.code == 0, ended.said
    assert ended.figures["completions"] > 20
    assert ended.figures["ttft_s.p99"] > 2.0
    assert ended.figures["lateness_s.p50"] < ended.figures["ttft_s.p50"]


async def test_a_reply_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(chunk(3))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with server(broken) as url:
        ended = await locust("trainer", url, tmp_path, "-t", "1s", "--prompts", "1", "--samples", "1")
    assert ended.code == 1
    assert ended.figures["failures"] > 0
    assert ended.figures["completions"] == 0


async def test_a_refusal_is_shown(tmp_path: Path) -> None:
    async def refusing(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.json_response({"error": {"message": "no replica is up"}}, status=504)

    async with server(refusing) as url:
        ended = await locust("open_loop", url, tmp_path, "-t", "1s", "--rate", "10")
    assert ended.code == 1
    assert "status 504" in ended.said
    assert "no replica is up" in ended.said


async def test_a_threshold_that_is_missed_fails_the_run(rig: Rig, tmp_path: Path) -> None:
    bounds = tmp_path / "bounds.yaml"
    bounds.write_text("failures: {max: 0}\nmakespan_s.p50: {max: 0.001}\n")
    report = tmp_path / "report.html"
    options = ["-t", "1s", "--prompts", "2", "--samples", "2", "--thresholds", str(bounds), "--report", str(report)]
    ended = await locust("trainer", rig.url, tmp_path, *options)
    assert ended.code == 3
    lines = [line for line in ended.said.splitlines() if line.startswith(("met", "MISSED"))]
    assert lines[0] == "met     failures = 0, at most 0"
    assert lines[1].startswith("MISSED  makespan_s.p50 = ")
    assert "at most 0.001: over by " in lines[1]
    assert lines[1] in report.read_text()
    bounds.write_text("makespan_s.p50: 3\n")
    refused = await locust("trainer", rig.url, tmp_path, *options)
    assert refused.code == 3
    assert "makespan_s.p50: 3 is no bound" in refused.said


async def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(chunk(3))
        await asyncio.sleep(60)
        return response

    async with server(silent) as url:
        options = ["-t", "1s", "--prompts", "1", "--samples", "1", "--request-timeout", "0.5"]
        ended = await locust("trainer", url, tmp_path, *options)
    assert ended.code == 1
    assert "no whole reply within 0.5 s (--request-timeout)" in ended.said
    assert ended.figures["failed_s.p50"] < 5


@pytest.mark.parametrize(
    ("scenario", "options", "says"),
    [
        ("trainer", ["--max-tokens", "8*x"], "--max-tokens: '8*x' is no length and no mix of lengths"),
        ("agents", ["--turns", "0"], "--turns: lengths and weights are at least 1: '0'"),
        ("trainer", ["--update-every", "1", "--weights", "/nowhere"], "--weights: /nowhere has no safetensors"),
    ],
)
async def test_an_option_that_cannot_be_is_refused_before_the_run(
    tmp_path: Path, scenario: str, options: list[str], says: str
) -> None:
    ended = await locust(scenario, "http://127.0.0.1:1", tmp_path, *options, "--processes", "2")
    assert ended.code == 1
    assert says in ended.said
