"""A gateway as one process, which a chaos run kills and starts again on the same port.

    python -m loadtests.chaos.processes.gateway_process CONFIG.json REPLICAS.json

Both are JSON files; the second lists the replicas and is read again at each discovery, as Serve's list is. The process
ends when its standard input closes, also by the death of its owner.
"""

import asyncio
import sys
from pathlib import Path

from pydantic import TypeAdapter

from engines.process.log_lines import write_log_lines
from engines.types import ReplicaInfo
from gateway.config.schema import Config
from gateway.http.listener import Listener

REPLICAS = TypeAdapter(list[ReplicaInfo])


def main() -> None:
    config_file, replicas_file = map(Path, sys.argv[1:])
    write_log_lines(sys.stderr)

    async def discover() -> list[ReplicaInfo]:
        return REPLICAS.validate_json(await asyncio.to_thread(replicas_file.read_bytes))

    listener = Listener(Config.model_validate_json(config_file.read_bytes()), discover)
    print(listener.start(), flush=True)
    while sys.stdin.buffer.read(4096):
        pass
    listener.stop()


if __name__ == "__main__":
    main()
