"""Readers beside engines that tests run without Serve, each on a thread of its own as there."""

from collections.abc import Iterable

from engines.clients.connect import connect
from engines.clients.external import external_engine
from engines.engine import Engine
from engines.reading.server import ReaderThread
from engines.types import EngineKind, ReplicaInfo


class Readers:
    """One for each start of an engine, from the first time that it is described."""

    def __init__(self) -> None:
        self._threads: dict[str, ReaderThread] = {}
        self._described: dict[str, ReplicaInfo] = {}

    async def beside(self, infos: Iterable[ReplicaInfo]) -> list[ReplicaInfo]:
        """The replicas, each with its reader."""
        return [await self._beside(info) for info in infos]

    def stop(self) -> None:
        for thread in self._threads.values():
            thread.stop()

    async def _beside(self, info: ReplicaInfo) -> ReplicaInfo:
        if info.incarnation not in self._described:
            self._threads[info.incarnation] = thread = ReaderThread(lambda: client(info))
            thread.start()
            self._described[info.incarnation] = await thread.beside(info, "127.0.0.1")
        return self._described[info.incarnation]


def client(info: ReplicaInfo) -> Engine:
    """The client with which a reader asks an engine."""
    if info.kind is EngineKind.EXTERNAL:
        return external_engine(info)
    return connect(info.kind, info.replica_id, info.url, has_tee=info.has_tee)
