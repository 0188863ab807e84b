"""A replica as Ray Serve runs it, without Ray: a process that owns one engine server and reads what it makes."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from engines.clients.connect import connect
from engines.config import EngineConfig
from engines.errors import EngineStartFailed
from engines.process.engine_server import EngineServer
from engines.process.log_lines import write_log_lines
from engines.process.process import longest_stop_s
from engines.reading.server import ReaderThread
from engines.types import ReplicaInfo
from loadtests.own_process import OwnProcess

_SLACK_S = 60.0


class ReplicaProcess:
    """One replica; `start` begins its next life where it has ended. `given` is as for `EngineServer`."""

    def __init__(self, engine: EngineConfig, **given: Any) -> None:
        self.engine = engine
        self._given = given
        self._process: OwnProcess | None = None

    async def start(self) -> ReplicaInfo:
        """Start the engine and its reader. Raise `EngineStartFailed`; a start that fails leaves no process."""
        await self.stop()
        self._process = await asyncio.to_thread(OwnProcess, _serve_replica, self.engine, self._given)
        try:
            # A start may be tried twice.
            info: ReplicaInfo = await self._process.told(2 * self.engine.start_timeout_s + _SLACK_S)
        except EOFError:
            await self.stop()
            raise EngineStartFailed(f"the process of {self._given['replica_id']} ended as it started") from None
        except BaseException:  # also a cancelled start
            await self.stop()
            raise
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


@asynccontextmanager
async def _serve_replica(engine: EngineConfig, given: dict[str, Any]) -> AsyncIterator[ReplicaInfo]:
    """Run the engine and its reader."""
    write_log_lines(sys.stderr)
    server = EngineServer(engine, **given)
    try:
        info = await server.start()
        reader = ReaderThread(lambda: connect(info.kind, info.replica_id, info.url, has_tee=info.has_tee))
        await asyncio.to_thread(reader.start)
        try:
            yield replace(info, reader=await reader.open("127.0.0.1"), reader_key=reader.key)
        finally:
            await asyncio.to_thread(reader.stop)
    finally:
        await server.stop()
