"""Engines as forks of a warm process: their own arguments, ends and codes, one import for all, the price of its death.

The engine is a module of a few lines.
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from engines.process.process import Command, EngineProcess
from engines.process.warm_start import Preload, WarmProcess
from tests.rigs.waiting import wait_until

SOON_S = 30.0
IMPORTED = "print('imported', flush=True)\n"
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=[9]).start()"
ENGINE = """
import os, sys, time
print(sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpgrp() == os.getpid(), flush=True)
if sys.argv[1:] == ["serve"]:
    time.sleep(300)
raise SystemExit(int(sys.argv[2]))
"""
Engines = Callable[..., EngineProcess]


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """The folder of the engine's modules, of which `heavy` takes long to import."""
    (tmp_path / "heavy.py").write_text(IMPORTED)
    (tmp_path / "engine.py").write_text(ENGINE)
    yield tmp_path
    for process in warm_processes(tmp_path):
        process.kill()


@pytest.fixture
async def engines(code: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engines]:
    monkeypatch.setenv("PYTHONPATH", f"{code}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TMPDIR", str(code))
    monkeypatch.setattr(tempfile, "tempdir", str(code))

    def engine(*words: str, release: str = "1", **env: str) -> EngineProcess:
        command = Command([sys.executable, "-m", "engine", *words], env, preload=Preload(["heavy"], release))
        made.append(EngineProcess(command, code / f"{len(made)}.log", 5.0))
        return made[-1]

    made: list[EngineProcess] = []
    yield engine
    for process in made:
        await process.stop()


def warm_processes(code: Path) -> list[psutil.Process]:
    """Those that have imported from this folder, and the forks of each."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "engines.process.warm_process" in process.cmdline() and str(code) in process.environ().get(
                "PYTHONPATH", ""
            ):
                found.append(process)
    return found


def warm_of(engine: EngineProcess) -> psutil.Process:
    parent = psutil.Process(engine.pid).parent()
    assert parent is not None
    return parent


def code_of(engine: EngineProcess) -> int | None:
    wait_until(lambda: engine.exit_code is not None, SOON_S)
    return engine.exit_code


def printed(engine: EngineProcess) -> list[str]:
    """What the log has after the command."""
    return engine.log_path.read_text().splitlines()[1:]


async def test_a_fork_has_its_own_arguments_gpus_log_and_exit_code(engines: Engines) -> None:
    one, other = engines("end", "3", CUDA_VISIBLE_DEVICES="1"), engines("end", "0", CUDA_VISIBLE_DEVICES="0,2")
    assert await one.start_warm()
    assert await other.start_warm()
    assert (code_of(one), code_of(other)) == (3, 0)
    assert printed(one) == ["imported", "['end', '3'] 1 True"]
    assert printed(other) == ["['end', '0'] 0,2 True"], "it imports nothing again"


async def test_engines_that_start_at_once_share_a_warm_process(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    def listen_late(self: socket.socket, backlog: int) -> None:
        time.sleep(0.3)  # a busy machine may take the core away between bind and listen
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", listen_late)
    both = engines("serve"), engines("serve")
    assert await asyncio.gather(*(engine.start_warm() for engine in both)) == [True, True]
    assert warm_of(both[0]) == warm_of(both[1])


async def test_what_can_change_an_import_needs_a_warm_process_of_its_own(engines: Engines, code: Path) -> None:
    for engine in (engines("end", "0"), engines("end", "0", LEVEL="1"), engines("end", "0", release="2")):
        assert await engine.start_warm()
        code_of(engine)
        assert printed(engine)[0] == "imported"
    assert len(warm_processes(code)) == 3


async def test_a_dead_warm_process_costs_its_engines_nothing_and_the_next_start_imports(
    engines: Engines, code: Path
) -> None:
    engine = engines("serve")
    assert await engine.start_warm()
    wait_until(lambda: bool(engine.engine_pid), SOON_S)
    warm_of(engine).kill()
    wait_until(lambda: len(warm_processes(code)) == 2, SOON_S)  # guard and engine
    assert engine.exit_code is None
    successor = engines("end", "0")
    assert await successor.start_warm()
    assert code_of(successor) == 0
    assert printed(successor)[0] == "imported"


@pytest.mark.parametrize("line", ["raise SystemExit(1)", THREAD])
async def test_where_no_warm_process_can_be_an_engine_starts_by_itself(engines: Engines, code: Path, line: str) -> None:
    (code / "heavy.py").write_text(line)
    engine = engines("end", "0")
    with capture_logs() as told:
        assert not await engine.start_warm()
    assert [entry["log_level"] for entry in told] == ["warning"]
    engine.start()
    assert code_of(engine) == 0


async def test_one_warm_process_alone_tries_where_none_can_be(engines: Engines, code: Path) -> None:
    (code / "heavy.py").write_text(IMPORTED + THREAD)
    one, other = engines("end", "0"), engines("end", "0")
    assert not await one.start_warm()
    assert not await other.start_warm()
    reason = "engines start cold: its modules have started threads: ['MainThread', 'Thread-1 (sleep)']"
    assert (printed(one), printed(other)) == (["imported", reason], [reason])


async def test_what_humming_builds_is_built_by_engines_alone(engines: Engines, code: Path) -> None:
    variable = "HUMMING_DISABLE_PARALLEL_BUILD"
    (code / "heavy.py").write_text(f"import os\nif os.environ.get('{variable}') != '1':\n    {THREAD}\n")
    (code / "engine.py").write_text(f"import os\nraise SystemExit('{variable}' in os.environ)\n")
    engine = engines()
    assert await engine.start_warm()
    assert code_of(engine) == 0


async def test_packages_that_have_changed_are_imported_again(engines: Engines, code: Path) -> None:
    (code / "bin").mkdir()
    packages = code / "lib" / "python3.1" / "site-packages"
    packages.mkdir(parents=True)
    (code / "bin" / "python").symlink_to(sys.executable)
    addresses = set()
    for name in ("torch-1", "torch-1", "torch-2"):
        (packages / name).mkdir(exist_ok=True)
        addresses.add(WarmProcess(str(code / "bin" / "python"), Preload(["heavy"], "1"), {})._address)
    assert len(addresses) == 2


async def test_a_start_that_is_cancelled_during_the_import_leaves_nothing(engines: Engines, code: Path) -> None:
    (code / "heavy.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(code / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    cancelled, successor = engines("serve"), engines("end", "0")
    start = asyncio.create_task(cancelled.start_warm())
    while not warm_processes(code):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # its order is in the line
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    (code / "go").touch()
    assert await successor.start_warm()
    assert code_of(successor) == 0
    wait_until(lambda: len(warm_processes(code)) == 1, SOON_S)
    assert printed(cancelled) == []


async def test_starts_whose_warm_process_is_killed_as_it_imports_go_on_by_themselves(
    engines: Engines, code: Path
) -> None:
    (code / "heavy.py").write_text("import time; time.sleep(300)")
    waiting = [engines("end", "0"), engines("end", "0")]
    starts = [asyncio.create_task(engine.start_warm()) for engine in waiting]
    async with asyncio.timeout(SOON_S):
        while not all(start.done() for start in starts):  # a start that comes late begins another
            for process in warm_processes(code):
                process.kill()
            await asyncio.sleep(0.1)
    assert [start.result() for start in starts] == [False, False]


def test_it_ends_without_children_and_without_starts(code: Path) -> None:
    program = (
        "import socket, sys; from engines.process import warm_process\n"
        "warm_process._KEPT_S = 0.1\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:\n"
        "    listener.bind('')\n"
        "    listener.listen()\n"
        "    sys.argv = ['', str(listener.detach()), 'heavy']\n"
        "    sys.exit(warm_process.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{code}:{os.getcwd()}"},
        timeout=SOON_S,
        stdout=subprocess.PIPE,
        text=True,
    )  # its output ends with the process
    assert (done.returncode, done.stdout) == (0, "imported\n")
