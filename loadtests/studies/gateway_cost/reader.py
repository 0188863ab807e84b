"""The reader beside the engine in a process of its own, as a Serve replica has it."""

from multiprocessing.connection import Connection

import uvloop

from engines.clients.vllm_engine import VllmEngine
from engines.reading.server import ReaderServer
from loadtests.own_process import until_closed

KEY = "of this study"


async def _serve(engine: str, pipe: Connection) -> None:
    server = ReaderServer(VllmEngine("engine-0", engine), KEY)
    pipe.send(await server.open("127.0.0.1"))
    await until_closed(pipe)
    await server.close()


def run(engine: str, pipe: Connection) -> None:
    """Serve in this process, beside `engine`, until the pipe closes."""
    uvloop.run(_serve(engine, pipe))
