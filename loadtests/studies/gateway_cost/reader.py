"""The reader beside the engine in a process of its own, as a Serve replica has it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from engines.clients.vllm_engine import VllmEngine
from engines.reading.server import ReaderServer
from engines.types import ReplicaInfo
from loadtests.own_process import Served

_KEY = "of this study"


@asynccontextmanager
async def serve(engine: str) -> AsyncIterator[str]:
    """Read beside `engine`."""
    server = ReaderServer(VllmEngine("engine-0", engine), _KEY)
    yield await server.open("127.0.0.1")
    await server.close()


def read(info: ReplicaInfo, engine: str, reader: Served) -> ReplicaInfo:
    """Describe a replica whose engine is at another URL, and has this reader beside it."""
    return replace(info, url=engine, reader=reader.url, reader_key=_KEY)
