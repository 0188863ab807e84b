"""A world of engines, gateways and trainers in virtual time, which a test drives through any interleaving.

The gateway is the product's but for its HTTP server: fleet, scheduler, dialect, coordinator, store. A killed gateway
stops between two steps of its tasks: nothing that it was about to do happens, and its locks are free.
"""

import asyncio
import contextvars
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from engines.engine import Json
from engines.errors import RolloutGatewayError, WeightUpdateFailed
from engines.store.draft import Draft, claim_draft
from engines.types import InFlight, ReplicaInfo
from gateway.config.schema import Config
from gateway.dialects.completions import Completions
from gateway.dialects.runner import Runner
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.replica import Replica
from gateway.http.server import GatewayServer
from sim.model import GREEDY, SimModel, read, weights_key
from tests.rigs.stories.played_engine import (
    CHECKPOINT,
    ELEMENTS,
    NAMES,
    SIM,
    Content,
    PlayedClient,
    PlayedEngine,
    Wire,
    is_bad,
    raw_tensor,
)
from tests.rigs.stories.played_engine import key as content_key

T = TypeVar("T")

_METRICS = Metrics()  # of all gateways, as they take long to make

_GATEWAY: contextvars.ContextVar["Gateway | None"] = contextvars.ContextVar("gateway", default=None)
_LOADS_S = (0.05, 0.05, 0.5, 2.0)
_START_S = 3.0
"""Serve starts a dead engine again after so long."""
LONGEST_HOLD_S = 45.0
"""An engine that nobody holds is never paused for longer: its brake retries a call that takes `control_timeout_s`."""
SETTLE_S = 400.0
_STAGE_BYTES = 1 << 20
_WEIGHTS: Json = {
    "control_timeout_s": 8.0, "load_timeout_s": 12.0, "transfer_timeout_s": 10.0, "init_timeout_s": 10.0,
    "drain_timeout_s": 15.0, "idle_timeout_s": 20.0, "adapter_timeout_s": 6.0, "adapter_unload_timeout_s": 6.0,
    "canary": {"tokens": 8, "timeout_s": 5.0},
}  # fmt: skip
_FAST: Json = {
    "fleet": {"discover_interval_s": 1.0, "probe_interval_s": 1.0, "probe_timeout_s": 1.0, "lost_after_s": 4.0},
    "gateway": {"queue_timeout_s": 120.0, "ledger": None},  # the ledger's thread knows no virtual time
}


class Violation(AssertionError):
    """A promise was broken."""


class GatewayDied(Exception):
    """The connection of a call ended with its gateway."""


@dataclass
class World:
    """Everything but the gateway: engines, Serve that starts them, trainers' wires, and the record of versions."""

    folder: Path
    config: Config
    random: random.Random
    engines: dict[str, PlayedEngine] = field(default_factory=dict)
    listening: dict[str, PlayedEngine] = field(default_factory=dict)
    """Each engine ever started, by incarnation. A removed engine can still be connected to, and does not answer."""
    wires: dict[int, Wire] = field(default_factory=dict)
    versions: dict[int, Content] = field(default_factory=lambda: {0: CHECKPOINT})
    pushes: list["Push"] = field(default_factory=list)
    wanted: int = 2
    stage_bytes: int = 0
    leaving: set[str] = field(default_factory=set)
    adapters: dict[str, Path] = field(default_factory=dict)
    started: int = 0
    delivered: int = 0
    gateway: "Gateway | None" = None
    has_lost_a_gateway: bool = False
    up: asyncio.Event = field(default_factory=asyncio.Event)
    unheld: dict[str, float] = field(default_factory=dict)
    relay: "PlayedRelay | None" = None

    def latency(self) -> float:
        return self.random.choice((0.0, 0.001, 0.003, 0.01, 0.01, 0.05))

    def start_engine(self, replica_id: str) -> PlayedEngine:
        self.started += 1
        load_s = self.random.choice(_LOADS_S)
        engine = PlayedEngine(replica_id, self.started, self.wires, self.latency, load_s, self.stage_bytes)
        self.engines[replica_id] = engine.start()
        self.listening[engine.info.incarnation] = engine
        self._look_for_a_new_run()
        return engine

    def _look_for_a_new_run(self) -> None:
        """Where gateway and engines have all ended, the next are another run, and their numbers begin again."""
        knows = self.gateway is not None and self.gateway.knows_the_run
        if not knows and not any(engine.has_served for engine in self.engines.values() if not engine.is_dead):
            self.versions = {0: CHECKPOINT}

    def engine(self, index: int) -> PlayedEngine:
        engines = list(self.engines.values())
        return engines[index % len(engines)]

    async def discover(self) -> list[ReplicaInfo]:
        return [engine.info for engine in self.engines.values()]

    def connect(self, info: ReplicaInfo) -> PlayedClient:
        gateway = _GATEWAY.get()
        assert gateway is not None
        return PlayedClient(self.listening[info.incarnation], lambda: gateway.is_dead)

    async def run_serve(self) -> None:
        """Start engines that died, and remove those that are no longer wanted, as Serve does."""
        while True:
            await asyncio.sleep(_START_S)
            for replica_id, engine in list(self.engines.items()):
                if engine.is_dead and replica_id not in self.leaving:
                    self.start_engine(replica_id)
            while len(self.engines) - len(self.leaving) < self.wanted:
                self.start_engine(next(f"engine-{n}" for n in range(99) if f"engine-{n}" not in self.engines))

    def bind(self, version: int, content: Content, where: str) -> None:
        """Note that `version` names this content. Raise `Violation` where it names another, or content of no push."""
        where = f"{where}: version {version} is {content}"
        if self.versions.get(version) == content:
            push = self.push_of(content)
            if push is not None and push.failed:
                raise Violation(f"{where}, whose push was answered with a failure")
            return
        if version in self.versions:
            raise Violation(f"{where}, and was {self.versions[version]} before")
        if is_bad(content):
            raise Violation(f"{where}, which every canary refuses")
        if self._is_mixture(content):
            raise Violation(f"{where}, a mixture")
        push = self.push_of(content)
        if push is not None and push.failed:
            raise Violation(f"{where}, whose push was answered with a failure")
        self.versions[version] = content

    def push_of(self, content: Content) -> "Push | None":
        """The last push that made a content; None for the checkpoint."""
        return self.pushes[int(content[1]) - 1] if content[1] else None

    def _is_mixture(self, content: Content) -> bool:
        b, w = content
        last, base = self.push_of(content), self.push_of((b, b))
        if b == w:
            return last is not None and last.partial
        if last is None or not last.partial or (base is not None and base.partial):
            return True
        return base is not None and last.ended is not None and base.begun > last.ended

    def look_for_left_updates(self, gateway: "Gateway", within_s: float) -> None:
        """Check that no update is open whose push ended more than `within_s` seconds ago."""
        update, now = gateway.weights.update, asyncio.get_running_loop().time()
        if update is None or gateway.has_ended:
            return
        for push in self.pushes:
            is_its_own = push.begun <= update.opened_at <= (push.ended or now)
            if is_its_own and push.ended is not None and push.ended + within_s <= now + 1e-6:
                raise Violation(f"the update of push {push.number}, whose trainer ended, is still open: {update}")

    def look(self) -> None:
        """Check what must hold at any time."""
        gateway, now = self.gateway, asyncio.get_running_loop().time()
        if gateway is None:
            self.unheld.clear()
            return
        self._look_for_a_new_run()
        gateway.knows_the_run = gateway.knows_the_run or bool(gateway.fleet.replicas)
        for replica in gateway.fleet.replicas:
            engine = self.engines.get(replica.replica_id)
            if engine is None or engine.is_dead or engine.info.incarnation != replica.info.incarnation:
                continue
            self._look_for_refused_kv(engine)
            if replica.can_serve and replica.weight_version is not None:
                engine.has_served = engine.has_served or replica.weight_version > 0
                self.bind(replica.weight_version, engine.content, f"{engine.info.incarnation} serves")
            frozen = engine.is_paused and not replica.brake.holders and replica.is_alive and engine._runs.is_set()
            since = self.unheld.setdefault(engine.info.incarnation, now) if frozen else None
            if not frozen:
                self.unheld.pop(engine.info.incarnation, None)
            elif since is not None and now - since > LONGEST_HOLD_S:
                raise Violation(f"{engine.info.incarnation} is paused, and nobody has held it for {now - since:.0f} s")

    def _is_refused(self, content: Content) -> bool:
        """True for content that no version may name: a canary refuses it, or it is a mixture."""
        return is_bad(content) or self._is_mixture(content)

    def _look_for_refused_kv(self, engine: PlayedEngine) -> None:
        for wrote, reads in engine.foreign_kv():
            if self._is_refused(wrote) and not self._is_refused(reads):
                raise Violation(f"{engine.info.incarnation} reads KV of refused weights {wrote} with {reads}")

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.1)

    def check(self, choice: Json, prompt: Sequence[int], max_tokens: int, adapter: str) -> None:
        """Check every token of a delivered sample against the weights that its spans name."""
        tokens, spans = choice["token_ids"], choice["weight_versions"]
        if len(tokens) != max_tokens and choice["finish_reason"] != "abort":  # by a trainer's pause
            raise Violation(f"{len(tokens)} tokens were delivered, and {max_tokens} were asked for: {choice}")
        context, model, place = read(prompt), SimModel.of(SIM), 0
        for versions, end in _stretches(spans, len(tokens)):
            if unknown := [version for version in versions if version not in self.versions]:
                raise Violation(f"tokens of versions {unknown}, which never served: {spans}")
            held = [content_key(self.versions[version]) for version in versions]
            keys = [weights_key(f"{content} under {adapter}" if adapter else content) for content in held]
            for token in tokens[place:end]:
                if all(model.next_token(context, GREEDY, key, False) != token for key in keys):
                    raise Violation(f"token {place} is not of version {versions} ({held}): {spans}")
                context = read((token,), context)
                place += 1
        if place != len(tokens):
            raise Violation(f"spans end at {place} of {len(tokens)} tokens: {spans}")
        self.delivered += 1


def _stretches(spans: Sequence[Json], length: int) -> Iterator[tuple[list[int], int]]:
    """The versions that tokens may be of, and the end of these tokens. Spans without limits are of the same tokens: the
    first part of a sample whose engine died before it reported where its weights changed."""
    place, unlimited = 0, list[int]()
    for span in spans:
        version: int = span["base_version"] if "base_version" in span else span["version"]
        if span["start"] is None:
            unlimited.append(version)
            continue
        if unlimited:
            yield unlimited, span["start"]
            place, unlimited = span["start"], []
        if span["start"] != place:
            raise Violation(f"spans have a gap: {spans}")
        yield [version], span["end"]
        place = span["end"]
    if unlimited:
        yield unlimited, length


@dataclass
class Push:
    """One push: its tensors have its number as their value. A partial one has `w` alone."""

    number: float
    partial: bool
    begun: float
    ended: float | None = None
    failed: bool = False


class Gateway:
    """One gateway process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_dead = False
        self.has_ended = False
        self.knows_the_run = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self.fleet = Fleet(world.config, discover=world.discover, connect=world.connect)
        self.server = GatewayServer(world.config, self.fleet, _METRICS)
        self.weights = self.server._weights
        self.adapters = self.server._adapters
        self.snapshots = self.server._snapshots
        runner = Runner(world.config.gateway, self.server.scheduler, self.fleet, _METRICS)
        self.completions = Completions(self.fleet, runner)
        self._watching = self.server._watching(None)  # type: ignore[arg-type]
        self._context = contextvars.copy_context()
        self._context.run(_GATEWAY.set, self)

    async def start(self) -> "Gateway":
        self.world.gateway = self
        try:
            await self._within(anext(self._watching))
        finally:  # a violation at the start ends the story
            self.world.up.set()
        return self

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """A client's request: ends with the gateway, and with its client."""
        self._check_there(work)
        try:
            return await self._within(work)
        except asyncio.CancelledError:
            if self.has_ended and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise GatewayDied from None
            raise

    def _check_there(self, work: Coroutine[Any, Any, T]) -> None:
        if self.has_ended:
            work.close()
            raise GatewayDied

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._calls.add(task)
        try:
            return await task
        finally:
            task.cancel()
            self._calls.discard(task)

    async def stop(self) -> None:
        """End as on SIGTERM: calls in flight are cut off, then the parts clear up."""
        self._leave()
        for call in list(self._calls):
            call.cancel()
        await asyncio.sleep(0.01)
        await self._within(anext(self._watching, None))
        await self._end_tasks()

    async def kill(self) -> None:
        """End between two steps: its tasks are cancelled only so that Python forgets them."""
        self.is_dead = True
        self._leave()
        if (store := self.snapshots._store) is not None:
            for lock in (store._lock, *store._owned.values()):
                os.close(lock)
            store._owned.clear()
        if self.world.relay is not None:
            await self.world.relay.close()
        await self._end_tasks()

    def _leave(self) -> None:
        self.has_ended = self.world.has_lost_a_gateway = True
        self.world.up.clear()
        self.world.gateway = None

    async def _end_tasks(self) -> None:
        ours = {task for task in self.tasks if not task.done()} - {asyncio.current_task()}
        for _ in range(100):
            if not ours:
                return
            for task in ours:
                task.cancel()
            _, ours = await asyncio.wait(ours, timeout=0.1)
        raise Violation(f"tasks do not end: {ours}")


class PlayedRelay:
    """Stands where `gateway.weights.relay_process.Relay` does, in the same process."""

    backend = "sim"

    def __init__(self, world: World) -> None:
        self._world = world
        self._wire: Wire | None = None
        self._draft: Draft | None = None
        self.is_open = False
        self._closed = asyncio.Event()
        world.relay = self

    def report(self) -> Json:
        return {"in_group": self.is_open, "backend": self.backend, "pid": None, "log_path": None}

    async def open(self, init_info: Json) -> None:
        await asyncio.sleep(self._world.latency())
        self._wire, self._draft, self.is_open = self._world.wires[init_info["master_port"]], None, True
        self._closed = asyncio.Event()

    async def find(self, *, in_group: bool) -> None:
        await self.close()

    async def begin(self, draft: Path, served: ReplicaInfo) -> None:
        await self._answer()
        self._draft = Draft(draft, served.model)

    async def receive(self, update_info: Json) -> None:
        wire = await self._answer()
        for name in update_info["names"]:
            arriving, closing = asyncio.ensure_future(wire.receive(name)), asyncio.ensure_future(self._closed.wait())
            try:
                await asyncio.wait(
                    [arriving, closing],
                    timeout=self._world.config.weights.transfer_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not arriving.done():
                    raise WeightUpdateFailed("the relay received nothing")
            except BaseException:
                await self.close()
                raise
            finally:
                arriving.cancel()
                closing.cancel()
            if self._draft is not None:
                self._draft.add([raw_tensor(name, arriving.result())])

    async def end(self) -> None:
        await self._answer()
        assert self._draft is not None
        self._draft.finish()

    async def drop(self) -> None:
        await self._answer()
        self._draft = None

    async def close(self) -> None:
        self.is_open = False
        self._closed.set()

    async def _answer(self) -> Wire:
        await asyncio.sleep(self._world.latency())
        if not self.is_open or self._wire is None:
            raise WeightUpdateFailed("the relay has ended")
        return self._wire


class Trainer:
    """One trainer: pushes numbered weights. `cancel` of its task is its death."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def push(
        self, gateway: Gateway, transport: str, *, partial: bool, bad: bool, in_flight: InFlight | None, slow_s: float
    ) -> int:
        world, clock = self._world, asyncio.get_running_loop().time
        number = len(world.pushes) + 1 + (0.5 if bad else 0.0)
        push = Push(number, partial, clock())
        world.pushes.append(push)
        values = dict.fromkeys(("w",) if partial else NAMES, number)
        try:
            if transport == "store":
                version = await self._push_store(gateway, values, in_flight, slow_s)
            else:
                version = await self._push_group(gateway, values, in_flight, slow_s)
        except RolloutGatewayError:
            push.failed = True
            raise
        finally:
            push.ended = clock()
        world.look()
        if world.versions.get(version, (number, number))[1] != number:
            raise Violation(f"push {number} was answered with version {version}, which is {world.versions[version]}")
        return version

    async def _push_group(
        self, gateway: Gateway, values: dict[str, float], in_flight: InFlight | None, slow_s: float
    ) -> int:
        weights, port = gateway.weights, len(self._world.wires) + 1
        wire = self._world.wires[port] = Wire()
        size = await gateway.call(weights.world_size())
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size + 1}
        await gateway.call(weights.init(info))
        try:
            await asyncio.sleep(slow_s)
            return await self._send(gateway, wire, f"127.0.0.1:{port}", values, in_flight, slow_s)
        finally:
            wire.announce()  # its trainer sends no more

    async def _send(
        self, gateway: Gateway, wire: Wire, group: str, values: dict[str, float], in_flight: InFlight | None,
        slow_s: float,
    ) -> int:  # fmt: skip
        weights = gateway.weights
        await asyncio.sleep(0)
        await gateway.call(weights.start(in_flight, group=group))
        try:
            for name, value in values.items():
                await asyncio.sleep(slow_s)
                wire.announce()
                told = {"names": [name], "dtype_names": ["float32"], "shapes": [[ELEMENTS]]}
                receiving = asyncio.ensure_future(gateway.call(weights.receive(told, group)))
                try:
                    await asyncio.sleep(slow_s)
                    wire.send({name: value})
                    await receiving
                finally:
                    receiving.cancel()
                    with suppress(BaseException):
                        await receiving
            await asyncio.sleep(slow_s)
            return await gateway.call(weights.finish(group=group))
        except RolloutGatewayError as error:
            with suppress(RolloutGatewayError, GatewayDied):
                await gateway.call(weights.abandon(str(error), group))
            raise

    async def _push_store(
        self, gateway: Gateway, values: dict[str, float], in_flight: InFlight | None, slow_s: float
    ) -> int:
        await gateway.call(gateway.snapshots.make_room(gateway.fleet.version))
        path, owner = claim_draft(gateway.snapshots.folder)
        try:
            draft = Draft(path, "sim")
            for name, value in values.items():
                draft.add([raw_tensor(name, value)])
                await asyncio.sleep(slow_s)
            draft.finish()
            return await gateway.call(gateway.weights.load(path.name, in_flight=in_flight))
        finally:
            os.close(owner)


async def _at_once(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Stands where `asyncio.to_thread` does. A thread ends its call whoever waits, but not when its process dies."""
    gateway = _GATEWAY.get()

    async def work() -> T:
        await asyncio.sleep(0.001)
        if gateway is not None and gateway.is_dead:
            raise asyncio.CancelledError
        return call(*arguments, **named)

    return await asyncio.shield(asyncio.ensure_future(work()))


def _owned_task(loop: asyncio.AbstractEventLoop, work: Any, **rest: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **rest)
    context = rest.get("context")
    gateway = context.get(_GATEWAY) if context is not None else _GATEWAY.get()
    if gateway is not None:
        gateway.tasks.add(task)
        task.add_done_callback(gateway.tasks.discard)
    return task


@asynccontextmanager
async def world_of(
    folder: Path, seed: int, *, relay: bool, replicas: int, stages: bool = True, **weights: Any
) -> AsyncIterator[World]:
    """Engines, which have room to stage where `stages`, Serve and a gateway. The checks of `look` run all the time, and
    raise at the end of the block."""
    tree = {
        "engine": {"kind": "sim", "model": "sim", "num_replicas": replicas, "enable_lora": True, "max_loras": 2},
        **_FAST,
        "weights": _WEIGHTS | {"store": str(folder / "store"), "relay": "always" if relay else "never"} | weights,
    }
    stage_bytes = _STAGE_BYTES if stages else 0
    world = World(folder, Config.model_validate(tree), random.Random(seed), wanted=replicas, stage_bytes=stage_bytes)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_owned_task)
    hold = Replica.hold

    def hold_and_bind(replica: Replica, version: int, *, keeps_kv: bool) -> None:
        hold(replica, version, keeps_kv=keeps_kv)
        engine = world.engines.get(replica.replica_id)
        if engine is not None and engine.info.incarnation == replica.info.incarnation:
            engine.has_served = engine.has_served or version > 0
            world.bind(version, engine.content, f"{replica.info.incarnation} takes")

    with ExitStack() as stack:
        stack.enter_context(patch("asyncio.to_thread", _at_once))
        stack.enter_context(patch.object(Replica, "hold", hold_and_bind))
        stack.enter_context(patch("gateway.weights.coordinator.Relay", lambda *_: PlayedRelay(world)))
        for index in range(replicas):
            world.start_engine(f"engine-{index}")
        await Gateway(world).start()
        background = [asyncio.create_task(world.run_serve()), asyncio.create_task(world.watch())]
        try:
            yield world
        finally:
            for task in background:
                task.cancel()
            ends = await asyncio.gather(*background, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
