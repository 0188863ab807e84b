"""Serve adds replicas under load and removes them again, on a real Ray cluster with simulated engines."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.ray_app import RESTART_S, App, deployed_alone
from tests.rigs.waiting import wait_until

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ENGINE = {
    "kind": "sim", "model": "sim", "num_cpus": 0.1, "stop_timeout_s": 1, "num_replicas": 1, "max_replicas": 2,
    "max_num_seqs": 4, "upscale_delay_s": 0.5, "downscale_delay_s": 2, "sim": {"start_s": 3.0, "decode_step_s": 0.02},
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with deployed_alone(ENGINE) as running:
        yield running


def test_a_group_grows_under_load_and_shrinks_after_it_and_each_rollout_is_whole(app: App) -> None:
    under_load = threading.Event()
    under_load.set()
    replies: list[Any] = []

    def work(tokens: int) -> None:
        body = {"model": "sim", "prompt": [5], "max_tokens": tokens, "ignore_eos": True}
        replies.append(app.ask(app.url + "/v1/completions", body)["usage"]["completion_tokens"] == tokens)

    def works_on() -> None:
        while under_load.is_set():
            work(40)
        work(200)

    workers = [threading.Thread(target=works_on) for _ in range(12)]
    for worker in workers:
        worker.start()
    told = {"first": app.replicas().keys()}
    try:
        wait_until(lambda: starting(app) != [], RESTART_S)
        assert "starts: starting for " in starting(app)[0]
        wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)
        added = app.replicas().keys() - told["first"]
        wait_until(lambda: all(replica["samples_placed"] for replica in app.replicas().values()), RESTART_S)
    finally:
        under_load.clear()
        for worker in workers:
            worker.join()
    assert len(added) == 1
    wait_until(lambda: app.states() == ["SERVING"], RESTART_S)
    assert len(replies) >= 24
    assert all(replies)
    report = app.ask(app.url + "/status")
    assert (report["ready"], report["replicas_lost"], report["replicas_missing"]) == (True, {}, [])


def starting(app: App) -> list[str]:
    return [row["reason"] for row in app.ask(app.url + "/status")["replicas_missing"] if row["start"]]
