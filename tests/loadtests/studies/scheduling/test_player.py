"""A drawn workload played against a gateway: turns, hints, ends of sessions, and failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtests.studies.scheduling.player import Player, p99, with_equal_samples
from tuning.simulate.workloads.workload import Ask, Stream

Json = dict[str, Any]


@dataclass
class Answering:
    """A server that completes each prompt with sevens. `missing` tokens are left out of each sample."""

    missing: int = 0
    is_silent: bool = False
    bodies: list[Json] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("X-Session-ID"))
        if self.is_silent:
            await asyncio.Event().wait()
        if len(body["prompt"]) > 100:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        ids = [7] * (body["max_tokens"] - self.missing)
        return web.json_response({"choices": [{"token_ids": ids}] * body["n"]})

    async def finish(self, request: web.Request) -> web.Response:
        self.finished.append(request.match_info["id"])
        return web.json_response({})


@asynccontextmanager
async def played(server: Answering, **settings: Any) -> AsyncIterator[Player]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/sessions/{id}/finish", server.finish)
    async with TestServer(app) as running, aiohttp.ClientSession() as http:
        yield Player(str(running.make_url("")).rstrip("/"), http, **settings)


def ask(**facts: Any) -> Ask:
    return Ask(**{"request": "r", "text": 1, "prefix": "p", "prompt": 5, "lengths": (3,), "limit": 3, **facts})


SESSION: Stream = [[[ask(session="s", prompt=5), ask(session="s", prompt=12, known=8, is_last=True)]]]


async def test_a_turn_repeats_all_that_was_said_and_the_last_reports_the_end() -> None:
    server = Answering()
    async with played(server) as player:
        await player.play(SESSION, 10.0)
    first, second = (body["prompt"] for body in server.bodies)
    assert (len(first), len(second)) == (5, 12)
    assert second[:8] == [*first, 7, 7, 7]
    assert server.sessions == ["s", "s"]
    assert server.finished == ["s"]
    assert (player.tokens, len(player.latencies), player.errors, player.said) == (6, 2, [], {})


async def test_prompts_of_another_salt_differ_and_are_as_long() -> None:
    server = Answering()
    for salt in ("a", "b", "a"):
        async with played(server, salt=salt) as player:
            await player.play([[[ask(prompt=50)]]], 10.0)
    first, second, third = (body["prompt"] for body in server.bodies)
    assert first == third != second
    assert server.sessions == [None, None, None]


async def test_hints_have_the_length_of_the_samples() -> None:
    server = Answering()
    stream = with_equal_samples([[[ask(lengths=(9, 30), limit=99)]]])
    for hints in (False, True):
        async with played(server, hints=hints) as player:
            await player.play(stream, 10.0)
            assert player.tokens == 18
    without, with_hint = server.bodies
    assert "expected_tokens" not in without
    assert (with_hint["expected_tokens"], with_hint["max_tokens"], with_hint["n"]) == (9, 9, 2)


async def test_a_refused_request_ends_its_chain_and_no_other() -> None:
    server = Answering()
    async with played(server) as player:
        await player.play([[[ask(request="long", prompt=200), ask(request="next")], [ask(request="short")]]], 10.0)
    assert [error for error in player.errors if "long" in error and "400" in error] == player.errors != []
    assert player.tokens == 3
    assert sorted(len(body["prompt"]) for body in server.bodies) == [5, 200]


async def test_samples_of_another_length_are_an_error() -> None:
    async with played(Answering(missing=1)) as player:
        await player.play([[[ask()]]], 10.0)
    assert "samples of [2] tokens, not of [3]" in player.errors[0]


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    async with played(Answering(is_silent=True)) as player:
        await player.play([[[ask()]]], 0.05)
    assert player.errors == ["the workload was not over after 0.05 s"]


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with aiohttp.ClientSession() as http:
        player = Player("http://127.0.0.1:1", http)
        await player.play([[[ask()]]], 10.0)
    assert "Cannot connect" in player.errors[0]


def test_the_99th_percentile() -> None:
    assert p99([float(second) for second in range(101)]) == 99.0
    assert p99([]) == 0.0
