"""A replica as Ray Serve runs it, without Ray: a process that owns one engine server and reads what it makes.

    python -m loadtests.replica_process

The first line of standard input is JSON: the arguments of `EngineServer`. A line of standard output describes the
replica, whenever an engine of it has started, or tells why none does. The process ends when its standard input closes,
also by the death of its owner, or when no engine follows one that has ended.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import orjson
import uvloop
from pydantic import TypeAdapter

from engines.clients.connect import connect
from engines.config import EngineConfig
from engines.errors import ConfigError, EngineStartFailed
from engines.process.engine_server import EngineServer
from engines.process.kept_engine import KeptEngine
from engines.process.log_lines import write_log_lines
from engines.process.process import longest_stop_s
from engines.types import ReplicaInfo

_INFO = TypeAdapter(ReplicaInfo)
_LONGEST_LINE = 1 << 26  # the tensors of a large model are in it
_SLACK_S = 60.0


class ReplicaProcess:
    """One replica; `start` begins its next life where the process has ended. `given` is as for `EngineServer`."""

    def __init__(self, engine: EngineConfig, **given: Any) -> None:
        self.engine = engine
        self._given = given
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> ReplicaInfo:
        """Start the engine and its reader. Raise `EngineStartFailed`; a start that fails leaves no process."""
        await self.stop()
        try:
            return await self._started()
        except BaseException:  # also a cancelled start
            await self.stop()
            raise

    async def successor(self) -> ReplicaInfo | None:
        """Return the description of the engine that follows one that has ended; None where the process ends instead."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return _described(line) if line else None

    async def stop(self) -> None:
        """End the reader, then the engine."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(longest_stop_s(self.engine.stop_timeout_s) + _SLACK_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """End the process with SIGKILL, as the kernel does without memory. Its engine ends with it."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)

    async def _started(self) -> ReplicaInfo:
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, limit=_LONGEST_LINE, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(orjson.dumps({"config": self.engine.model_dump(mode="json"), **self._given}) + b"\n")
        async with asyncio.timeout(2 * self.engine.start_timeout_s + _SLACK_S):  # a start may be tried twice
            line = await process.stdout.readline()
        if not line:
            raise EngineStartFailed(f"the process of {self._given['replica_id']} ended as it started")
        return _described(line)


def _described(line: bytes) -> ReplicaInfo:
    told = orjson.loads(line)
    if isinstance(told, str):
        raise EngineStartFailed(told)
    return _INFO.validate_python(told)


async def _own(engine: KeptEngine) -> None:
    """Run the engine and its reader until standard input closes."""
    loop, ours = asyncio.get_running_loop(), asyncio.current_task()
    assert ours is not None

    def end() -> None:
        loop.remove_reader(sys.stdin)
        ours.cancel()

    loop.add_reader(sys.stdin, end)
    try:
        await engine.start()
        await engine.ended()
    except (EngineStartFailed, ConfigError) as error:
        _say(orjson.dumps(str(error)))
    except asyncio.CancelledError:
        return
    finally:
        await engine.stop()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def main() -> None:
    write_log_lines(sys.stderr)
    given = orjson.loads(sys.stdin.buffer.readline())
    config = EngineConfig.model_validate(given.pop("config"))
    uvloop.run(_own(_kept(EngineServer(config, **given), index=given["index"], has_standby=config.standby > 0)))


def _kept(server: EngineServer, **given: Any) -> KeptEngine:
    return KeptEngine(
        server,
        lambda info: connect(info.kind, info.replica_id, info.url, has_tee=info.has_tee),
        on_start=lambda info: _say(_INFO.dump_json(info)),
        **given,
    )


if __name__ == "__main__":
    main()
