"""A replica as Ray Serve runs it, without Ray: a process that owns one engine server and reads what it makes."""

import asyncio
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from engines.clients.external import connect
from engines.config import EngineConfig
from engines.errors import ConfigError, EngineStartFailed
from engines.process.engine_server import EngineServer
from engines.process.kept_engine import KeptEngine
from engines.process.log_lines import write_log_lines
from engines.process.process import longest_stop_s
from engines.types import ReplicaInfo
from loadtests.own_process import OwnProcess

_SLACK_S = 60.0


class ReplicaProcess:
    """One replica; `start` begins its next life where the process has ended. `given` is as for `EngineServer`."""

    def __init__(self, engine: EngineConfig, **given: Any) -> None:
        self.engine = engine
        self._given = given
        self._process: OwnProcess | None = None

    async def start(self) -> ReplicaInfo:
        """Start the engine and its reader. Raise `EngineStartFailed`; a start that fails leaves no process."""
        await self.stop()
        self._process = await asyncio.to_thread(OwnProcess, _own, self.engine, self._given)
        try:
            info = await self.successor()
        except BaseException:  # also a cancelled start
            await self.stop()
            raise
        if info is None:
            await self.stop()
            raise EngineStartFailed(f"the process of {self._given['replica_id']} ended as it started")
        return info

    async def successor(self) -> ReplicaInfo | None:
        """Return the description of the engine that follows one that has ended; None where the process ends instead."""
        assert self._process is not None
        try:
            # A start may be tried twice.
            info: ReplicaInfo = await self._process.told(2 * self.engine.start_timeout_s + _SLACK_S)
        except EOFError:
            return None
        return info

    async def stop(self) -> None:
        """End the reader, then the engine."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop(longest_stop_s(self.engine.stop_timeout_s) + _SLACK_S)

    def kill(self) -> None:
        """End the process with SIGKILL, as the kernel does without memory. Its engine ends with it."""
        assert self._process is not None
        self._process.kill()


def _own(pipe: Connection, config: EngineConfig, given: dict[str, Any]) -> None:
    """Run the replica in this process; tell each of its engines as it has started, or why none does."""
    os.setsid()  # an interrupt from the terminal is its owner's to handle
    write_log_lines(sys.stderr)
    engine = KeptEngine(
        EngineServer(config, **given),
        connect,
        has_standby=config.standby > 0,
        on_start=pipe.send,
    )
    uvloop.run(_until_closed(pipe, engine))


async def _until_closed(pipe: Connection, engine: KeptEngine) -> None:
    """Run the engine and its reader until the other end of the pipe closes, or no engine follows one that has ended."""
    loop, ours = asyncio.get_running_loop(), asyncio.current_task()
    assert ours is not None

    def end() -> None:
        loop.remove_reader(pipe.fileno())
        ours.cancel()

    loop.add_reader(pipe.fileno(), end)
    try:
        await engine.start()
        await engine.ended()
    except (EngineStartFailed, ConfigError) as error:
        pipe.send(error)
    except asyncio.CancelledError:
        return
    finally:
        await engine.stop()
