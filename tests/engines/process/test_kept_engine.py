"""An engine that ends is followed by another where it stands: its standby, or a start anew."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engines.clients.external import connect
from engines.config import EngineConfig
from engines.errors import EngineError
from engines.process import standby as standby_module
from engines.process.engine_server import EngineServer
from engines.process.kept_engine import KeptEngine
from engines.process.standby import Standby
from engines.types import ReplicaInfo

SOON_S = 60.0
_CONFIG = {"kind": "sim", "model": "tiny", "stop_timeout_s": 5}


class Kept:
    """A kept engine, and the engines that have served there."""

    def __init__(self, config: EngineConfig) -> None:
        self.served: list[ReplicaInfo] = []
        self._changed = asyncio.Event()
        server = EngineServer(config, replica_id="engine-0", group="engine", index=3)
        self.engine = KeptEngine(
            server,
            connect,
            has_standby=config.standby > 0,
            on_start=self._started,
        )

    def _started(self, info: ReplicaInfo) -> None:
        self.served.append(info)
        self._changed.set()

    async def successor_of(self, signal_number: signal.Signals) -> ReplicaInfo:
        """Send the engine a signal; return the next one's description."""
        self._changed.clear()
        os.kill(self.served[-1].pid, signal_number)
        async with asyncio.timeout(SOON_S):
            await self._changed.wait()
        return self.served[-1]


NewKept = Callable[..., Kept]


@pytest.fixture
async def new_kept(tmp_path: Path) -> AsyncIterator[NewKept]:
    made: list[Kept] = []

    def new(**levers: object) -> Kept:
        made.append(Kept(EngineConfig.model_validate({**_CONFIG, "log_dir": str(tmp_path), **levers})))
        return made[-1]

    yield new
    for kept in made:
        await kept.engine.stop()


async def standby_of(kept: Kept) -> int:
    """Wait for the sleeping engine; return its process id, that of the listener on the port in its log's name."""
    assert kept.engine.standby is not None
    async with asyncio.timeout(SOON_S):
        while kept.engine.standby.server is None or not kept.engine.standby.server.sleeps:
            await asyncio.sleep(0.02)
    own = [int(one.url.rpartition(":")[2]) for one in kept.served]
    logs = Path(kept.served[0].log_path).parent.glob("*.log")
    (port,) = {int(log.stem.rpartition("-")[2]) for log in logs} - set(own)
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    (pid,) = {one.pid for one in listening if one.laddr.port == port}
    assert pid is not None
    return int(pid)


async def test_an_engine_that_ends_is_started_again_with_a_reader_of_its_own(new_kept: NewKept) -> None:
    kept = new_kept()
    await kept.engine.start()
    before = kept.engine.reader
    second = await kept.successor_of(signal.SIGKILL)
    assert second.incarnation != kept.served[0].incarnation
    assert second.reader != kept.served[0].reader
    assert before is not None
    assert not before.is_alive
    await kept.engine.check()


async def test_one_that_soon_ends_again_is_left_to_its_owner(new_kept: NewKept) -> None:
    kept = new_kept()
    await kept.engine.start()
    second = await kept.successor_of(signal.SIGKILL)
    os.kill(second.pid, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):
        await kept.engine.ended()
    assert kept.served == [kept.served[0], second]


async def test_none_follows_the_engine_of_a_replica_that_is_removed(new_kept: NewKept) -> None:
    kept = new_kept()
    await kept.engine.start()
    await kept.engine.keep_no_longer()
    os.kill(kept.served[0].pid, signal.SIGKILL)
    await asyncio.sleep(1)
    with pytest.raises(EngineError, match="the engine was killed"):
        await kept.engine.check()
    assert len(list(Path(kept.served[0].log_path).parent.glob("*.log"))) == 1


async def test_a_standby_takes_over_without_a_start_and_another_follows_it(new_kept: NewKept) -> None:
    kept = new_kept(standby=1)
    await kept.engine.start()
    for _ in range(2):
        standby = await standby_of(kept)
        successor = await kept.successor_of(signal.SIGKILL)
        assert successor.pid == standby
        engine = connect(successor)
        label = await engine.weight_label(SOON_S)
        await engine.close()
        assert not label.held, "its weights are of no version until the gateway loads them"


async def test_a_standby_that_starts_is_waited_for(new_kept: NewKept) -> None:
    kept = new_kept(standby=1, sim={"start_s": 1})
    await kept.engine.start()
    folder = Path(kept.served[0].log_path).parent
    async with asyncio.timeout(SOON_S):
        while len(logs := set(folder.glob("*.log"))) < 2:
            await asyncio.sleep(0.02)
    waited = asyncio.create_task(kept.successor_of(signal.SIGKILL))
    async with asyncio.timeout(SOON_S):
        while not kept.engine.phases:
            await asyncio.sleep(0.02)
    await kept.engine.check()  # or Serve would end the replica with the standby
    assert kept.engine.phases[0][1] > kept.served[0].started, "the phases are those of the standby"
    successor = await waited
    assert Path(successor.log_path) in logs - {Path(kept.served[0].log_path)}


async def test_an_engine_that_is_stopped_is_replaced(new_kept: NewKept) -> None:
    kept = new_kept()
    await kept.engine.start()
    second = await kept.successor_of(signal.SIGSTOP)
    assert not psutil.pid_exists(kept.served[0].pid)
    assert psutil.pid_exists(second.pid)


async def test_a_standby_ends_with_its_replica(new_kept: NewKept) -> None:
    kept = new_kept(standby=1)
    await kept.engine.start()
    standby = await standby_of(kept)
    await kept.engine.stop()
    assert not psutil.pid_exists(standby)


async def test_a_standby_that_has_ended_is_started_anew(tmp_path: Path) -> None:
    """As where the kernel kills both for want of memory."""
    config = EngineConfig.model_validate({**_CONFIG, "log_dir": str(tmp_path)})
    first = EngineServer(config, replica_id="engine-0", group="engine", index=3)
    standby = first.standby()
    try:
        ended = await standby.start()
        await standby.sleep()
        os.kill(ended.pid, signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            await standby.ended()
        assert (await standby.start()).pid != ended.pid
        await standby.check()
    finally:
        await standby.stop()


async def test_standbys_that_soon_end_are_started_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    lives, now, waits = [1.0, 1.0, 5_000.0, 1.0], [0.0], list[float]()

    class Played:
        sleeps = False

        async def start(self) -> None: ...
        async def sleep(self) -> None: ...
        async def stop(self) -> None: ...

        async def ended(self) -> None:
            now[0] += lives[len(waits)]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == len(lives):
            raise asyncio.CancelledError

    beside: Any = SimpleNamespace(standby=Played)
    monkeypatch.setattr(standby_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Standby()._keep(beside)
    assert waits == [20.0, 40.0, 20.0, 40.0]
