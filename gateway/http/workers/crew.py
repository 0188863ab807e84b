"""The workers of a gateway: started, watched, started again after a death, and asked as one."""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
from pydantic import SecretStr

from engines.engine import Json
from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import CountKey, count_key
from gateway.fleet.placement.scheduler import Scheduler
from gateway.http.own_requests import AbortKind
from gateway.http.supervisor import Supervisor
from gateway.http.workers.link import Link
from gateway.http.workers.messages import Batches, Crew, Hello, Lengths, Withdraw
from gateway.http.workers.porter import Porter

log = structlog.get_logger()

START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 8.0
_TICK_S = 0.25
_SPEAKS_EVERY = 4  # ticks
# A worker reports every second. Ticks of this process are counted, since it may have stood still itself.
_SILENT_TICKS = 120
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.2, 30.0, 60.0


class _Place:
    """The place of one worker, which its successors take over."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.pid = 0
        self.starts = 0
        self.has_served = asyncio.Event()


class Workers:
    """None until `start`: a gateway of one process has no workers."""

    def __init__(self, config: Config, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._places: list[_Place] = []
        self._tasks = Supervisor()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._porter: Porter | None = None
        self._retired: dict[CountKey, float] = {}
        self._learned: dict[tuple[str, int], float] = {}
        self._batches: defaultdict[int, set[bytes]] = defaultdict(set)  # by the worker that has them

    @property
    def failure(self) -> str:
        """The end of a watch that should run on; "" while all run."""
        return self._tasks.failure

    def open_folder(self) -> Path:
        """Make the folder of the doors between the processes, which this user alone can enter."""
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-gateway-", dir="/tmp", ignore_cleanup_errors=True)
        return Path(self._folder.name)  # not where TMPDIR says: the path of a socket is short

    async def start(self, listening: Sequence[socket.socket]) -> None:
        """Start all workers, which get the connections of `listening`, closed by `stop`; return once they serve.

        Raise `TimeoutError` where they do not in time.
        """
        self._places = [_Place() for _ in range(self._config.gateway.workers)]
        for index in range(len(self._places)):
            self._tasks.start(f"keep worker {index}", self._keep(index))
        self._tasks.start("speak to workers", self._speak())
        async with asyncio.timeout(START_TIMEOUT_S):
            for place in self._places:
                await place.has_served.wait()
        self._porter = Porter(listening, self._serving)

    async def stop(self) -> None:
        """End all workers; their replies under way have some seconds."""
        porter, self._porter = self._porter, None
        if porter is not None:
            porter.close()
        await self._tasks.stop()
        self._places = []
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    def report(self) -> list[Json]:
        """The state for /status."""
        return [
            {
                "worker": index,
                "pid": place.pid,
                "is_serving": place.link is not None and place.link.ready.is_set(),
                "restarts": max(0, place.starts - 1),
                "connections": place.link.num_connections if place.link else 0,
                "rollouts": place.link.num_rollouts if place.link else 0,
            }
            for index, place in enumerate(self._places)
        ]

    def counts(self) -> Mapping[CountKey, float]:
        """The sums of all that workers have counted, those that have ended too."""
        counts = dict(self._retired)
        for link in self._links:
            _add(counts, link)
        return counts

    async def abort(self, kind: AbortKind, ids: tuple[str, ...], client: str | None) -> None:
        """End requests of these ids, those of `client` alone if it is given, in all workers."""
        await asyncio.gather(*(link.abort(kind, ids, client) for link in self._links))

    async def withdraw_policy(self) -> None:
        """End the policy's rollouts that are between two attempts in workers; return once that is done."""
        if (policy := self._fleet.models.policy) is not None:
            for link in self._links:
                link.tell(Withdraw(policy))
            await self._fleet.changes.taken()

    @property
    def _links(self) -> list[Link]:
        return [place.link for place in self._places if place.link is not None]

    def _serving(self) -> list[Link]:
        return [link for link in self._links if link.ready.is_set()]

    async def _keep(self, index: int) -> None:
        """Run a worker, and its successors, until cancelled."""
        place, pause_s = self._places[index], _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                reason = f"ended with {await self._run(index, place)}"
            except OSError as error:  # no descriptor or no memory is left, as may be for some time
                reason = f"cannot be started: {error}"
            if time.monotonic() - began > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            log.error("a worker is started again", worker=index, reason=reason, in_s=pause_s)
            self._fleet.events.add(f"worker {index}", f"{reason}, is started again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self, index: int, place: _Place) -> int:
        """Run a worker to its end; return its exit code."""
        assert self._folder is not None
        folder = self._folder.name
        with ExitStack() as ends:
            ours, theirs = map(ends.enter_context, socket.socketpair())
            hands, takes = map(ends.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            process = await asyncio.to_thread(_started, theirs, takes, folder)
            theirs.close()  # now the worker alone holds these ends, which close with it
            takes.close()
            return await self._live(index, place, process, ours, hands)

    async def _live(
        self, index: int, place: _Place, process: "subprocess.Popen[bytes]", end: socket.socket, hands: socket.socket
    ) -> int:
        link = Link(
            index,
            self._fleet,
            self._scheduler,
            kill=process.kill,
            learned=self._learn,
            served=self._tell_crew,
            has_batches=self._tell_batches,
        )
        place.pid, place.starts = process.pid, place.starts + 1
        try:
            assert self._folder is not None
            await link.open(end, hands, Hello(_document(self._config), index, self._folder.name))
            place.link = link
            for other, batches in self._batches.items():
                link.tell(Batches(other, tuple(batches), ()))
            await self._watch(link, place)
        except asyncio.CancelledError:
            link.stop()
            raise
        finally:
            code = await asyncio.shield(asyncio.to_thread(_ended, process))
            _add(self._retired, link)
            place.link = None
            self._batches.pop(index, None)
            self._tell_crew()
        return code

    async def _watch(self, link: Link, place: _Place) -> None:
        """Return when the worker has ended: one that does not start, or is silent, is ended here."""
        silent, heard_at = 0, link.heard_at
        while not link.ended.is_set():
            try:
                async with asyncio.timeout(_TICK_S):
                    await link.ended.wait()
            except TimeoutError:
                silent, heard_at = silent + 1 if heard_at == link.heard_at else 0, link.heard_at
            if link.ready.is_set():
                place.has_served.set()
            if silent > (_SILENT_TICKS if link.ready.is_set() else START_TIMEOUT_S / _TICK_S):
                log.error("a worker is silent, and is ended", worker=link.index)
                link.kill()
                silent = 0

    async def _speak(self) -> None:
        """Tell workers what they need not know at once: lengths of samples; and that the owner lives."""
        while True:
            for tick in range(_SPEAKS_EVERY):
                await asyncio.sleep(_TICK_S)
                learned, self._learned = self._learned, {}
                lengths = [(model, key, tokens) for (model, key), tokens in learned.items()]
                for link in self._links:
                    if tick == 0:
                        link.versions()
                    if lengths:
                        link.tell(Lengths(lengths))

    def _learn(self, model: str, key: int) -> None:
        if (tokens := self._scheduler.lengths.of(model, key)) is not None:
            self._learned[model, key] = tokens

    def _tell_batches(self, batches: Batches) -> None:
        """Tell the others of a worker's batches. A worker that starts hears of all batches."""
        known = self._batches[batches.worker]
        known.update(batches.begun)
        known.difference_update(batches.ended)
        for link in self._links:
            if link.index != batches.worker:
                link.tell(batches)

    def _tell_crew(self) -> None:
        crew = Crew(tuple(link.index for link in self._serving()))
        for link in self._links:
            link.tell(crew)


def _started(end: socket.socket, takes: socket.socket, folder: str) -> "subprocess.Popen[bytes]":
    descriptors = end.fileno(), takes.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", "gateway.http.workers.process", *map(str, descriptors), folder],
        stdin=subprocess.PIPE,  # never written: its end is the owner's
        pass_fds=descriptors,
        start_new_session=True,
    )


def _ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process that is to end, and end it if it does not."""
    try:
        code = process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    assert process.stdin is not None
    process.stdin.close()
    return code


def _add(counts: dict[CountKey, float], link: Link) -> None:
    for name, labels, value in link.report.counts:
        key = count_key(name, labels)
        counts[key] = counts.get(key, 0.0) + value


def _document(config: Config) -> bytes:
    """The configuration with its keys as JSON, for processes of this user alone."""
    return json.dumps(config.model_dump(), default=_plain).encode()  # the standard library's keeps infinity


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
