"""Readers beside engines that tests run without Serve, each on a thread of its own as there."""

from collections.abc import Iterable

from engines.clients.external import connect
from engines.reading.server import ReaderThread
from engines.types import ReplicaInfo


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
            self._threads[info.incarnation] = thread = ReaderThread(lambda: connect(info))
            thread.start()
            self._described[info.incarnation] = await thread.beside(info, "127.0.0.1")
        return self._described[info.incarnation]
