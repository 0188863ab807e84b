"""An engine process as its owner sees it: log, exit code, end."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engines.process.process import Command, EngineProcess
from tests.rigs.waiting import wait_until

SOON_S = 30.0
StartScript = Callable[..., EngineProcess]


@pytest.fixture
async def start_script(tmp_path: Path) -> AsyncIterator[StartScript]:
    started: list[EngineProcess] = []

    def start(script: str, stop_timeout_s: float = 5.0, **env: str) -> EngineProcess:
        command = Command(["sh", "-c", script], env)
        started.append(EngineProcess(command, tmp_path / "logs" / "engine.log", stop_timeout_s))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        await process.stop()


def code_of(process: EngineProcess) -> int:
    wait_until(lambda: process.exit_code is not None, SOON_S)
    assert process.exit_code is not None
    return process.exit_code


async def test_stop_does_not_wait_for_ever_for_a_guard_that_does_not_end(
    start_script: StartScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_script("sleep 60")
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, capture_logs() as told:
        patch.setattr("engines.process.process.longest_stop_s", lambda _: 0.1)
        await process.stop()
    os.kill(process.pid, signal.SIGCONT)
    assert [line["guard"] for line in told] == [process.pid]


def test_a_process_below_the_engine_that_is_stopped_is_seen_until_it_goes_on(
    start_script: StartScript, tmp_path: Path
) -> None:
    worker = tmp_path / "worker"
    process = start_script(f"sh -c 'echo $$ > {worker}.new; mv {worker}.new {worker}; sleep 60; :'; :")
    wait_until(worker.exists, SOON_S)
    pid = int(worker.read_text())
    assert not process.is_stopped
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process.is_stopped, SOON_S)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not process.is_stopped, SOON_S)


def test_an_engine_that_is_killed_ends_though_its_guard_was_stopped_too(start_script: StartScript) -> None:
    process = start_script("sleep 60")
    wait_until(lambda: process.engine_pid > 0, SOON_S)
    for pid in (process.pid, process.engine_pid):
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert code_of(process) == 128 + signal.SIGKILL


def test_the_log_begins_with_the_command_and_holds_both_outputs(start_script: StartScript) -> None:
    process = start_script("echo out; echo err >&2")
    assert code_of(process) == 0
    first, *others = process.log_path.read_text().splitlines()
    assert first.endswith(" sh -c echo out; echo err >&2")
    assert others == ["out", "err"]


def test_last_words_are_the_last_lines_of_a_long_log(start_script: StartScript) -> None:
    process = start_script("seq 1 20000")
    code_of(process)
    assert process.last_words(3) == "19998\n19999\n20000"
    assert len(process.last_words().splitlines()) == 20


async def test_an_engine_inherits_its_owner_s_environment_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROLLOUT_GATEWAY_GATEWAY__ADMIN_KEYS", "ROLLOUT_API_KEY", "RAY_AUTH_TOKEN", "OWN_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    command = Command(["env"], env={"ROLLOUT_GATEWAY_OF_ENGINES": "1"}, hidden=["OWN_KEY"])
    process = EngineProcess(command, tmp_path / "engine.log", 1.0)
    process.start()
    assert code_of(process) == 0
    await process.stop()
    found = {line.partition("=")[0] for line in process.last_words(lines=1000).splitlines() if "=hunter2" in line}
    assert found == {"HF_TOKEN"}  # the engine downloads models with it
    assert "ROLLOUT_GATEWAY_OF_ENGINES=1" in process.last_words(lines=1000)


def test_the_log_is_its_owner_s_alone(start_script: StartScript) -> None:
    process = start_script("true")
    assert process.log_path.stat().st_mode & 0o777 == 0o600
