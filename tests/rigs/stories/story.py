"""Stories: what clients, trainers, hosts and operators do to a world of engines, step after step and all at once."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engines.errors import RolloutGatewayError
from engines.raw_json import opened
from engines.types import InFlight, PauseMode, ReplicaState
from engines.weight_label import WeightLabel
from sim.adapters import SimAdapters
from tests.material.adapters import write_adapter
from tests.rigs.stories.interleaving import SETTLE_S, Gateway, GatewayDied, Trainer, Violation, World

MOST_ENGINES = 4
_LONGEST_CALL_S = 600.0
_REST_S = 20.0
_NOTICED_S = 25.0
_FINAL_TRIES = 20


@dataclass(frozen=True)
class Step(ABC):
    """One deed, `after` seconds after the one before began. They overlap."""

    after: float

    @abstractmethod
    async def play(self, story: "Story") -> None:
        """Do the deed, and check what must follow from it."""


@dataclass(frozen=True)
class Rollout(Step):
    tokens: int
    streamed: bool
    adapter: bool

    async def play(self, story: "Story") -> None:
        await story.roll(self.tokens, streamed=self.streamed, adapter="a" if self.adapter else "")


@dataclass(frozen=True)
class PushStep(Step):
    """A push; the trainer dies `dies_after` seconds into it, if that is given."""

    trainer: int
    store: bool
    partial: bool
    bad: bool
    in_flight: InFlight | None
    slow_s: float
    dies_after: float | None

    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()
        trainer = story.trainers[self.trainer]
        options = {"partial": self.partial, "bad": self.bad}
        pushing = asyncio.ensure_future(
            trainer.push(
                gateway, "store" if self.store else "group", in_flight=self.in_flight, slow_s=self.slow_s, **options
            )
        )
        await asyncio.wait([pushing], timeout=self.dies_after)
        if not pushing.done():
            pushing.cancel()
            story.trainers[self.trainer] = Trainer(story.world)
            await asyncio.wait([pushing])
            await asyncio.sleep(_NOTICED_S)
            story.world.look_for_left_updates(gateway, _NOTICED_S)
        if not pushing.cancelled():
            pushing.result()


@dataclass(frozen=True)
class Kill(Step):
    engine: int

    async def play(self, story: "Story") -> None:
        story.world.engine(self.engine).kill()


@dataclass(frozen=True)
class Stop(Step):
    """The engine's host stands still."""

    engine: int
    seconds: float

    async def play(self, story: "Story") -> None:
        engine = story.world.engine(self.engine)
        engine.stop()
        await asyncio.sleep(self.seconds)
        engine.go_on()


@dataclass(frozen=True)
class Pause(Step):
    mode: PauseMode
    clear_cache: bool

    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()
        await gateway.call(gateway.weights.pauses.pause(self.mode, clear_cache=self.clear_cache))


@dataclass(frozen=True)
class Resume(Step):
    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()
        await gateway.call(gateway.weights.pauses.resume())


@dataclass(frozen=True)
class AbortAll(Step):
    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()

        async def work() -> None:
            await gateway.weights.pauses.pause(PauseMode.ABORT, clear_cache=False)
            await gateway.weights.pauses.resume()

        await gateway.call(work())


@dataclass(frozen=True)
class LoadAdapter(Step):
    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()
        folder = str(story.world.adapters["a"])
        await gateway.call(gateway.adapters.load("a", folder))


@dataclass(frozen=True)
class UnloadAdapter(Step):
    async def play(self, story: "Story") -> None:
        gateway = await story.gateway()
        await gateway.call(gateway.adapters.unload("a"))


@dataclass(frozen=True)
class ScaleUp(Step):
    async def play(self, story: "Story") -> None:
        story.world.wanted = min(MOST_ENGINES, story.world.wanted + 1)


@dataclass(frozen=True)
class ScaleDown(Step):
    """Serve drains a replica, and ends it after some time whatever it does."""

    engine: int

    async def play(self, story: "Story") -> None:
        world = story.world
        if world.wanted - 1 < 1:
            return
        engine = world.engine(self.engine)
        replica_id = engine.info.replica_id
        if replica_id in world.leaving:
            return
        world.wanted -= 1
        world.leaving.add(replica_id)
        if world.gateway is not None:
            world.gateway.fleet.drain(replica_id)
        await asyncio.sleep(4.0)
        world.engines.pop(replica_id).kill()
        world.leaving.discard(replica_id)


@dataclass(frozen=True)
class RestartGateway(Step):
    killed: bool
    down_s: float

    async def play(self, story: "Story") -> None:
        async with story.restarting:
            gateway = story.world.gateway
            assert gateway is not None
            await (gateway.kill() if self.killed else gateway.stop())
            await asyncio.sleep(self.down_s)
            await Gateway(story.world).start()


@dataclass(frozen=True)
class RelayDies(Step):
    async def play(self, story: "Story") -> None:
        if story.world.relay is not None:
            await story.world.relay.close()


class Story:
    """Plays steps in a world, and brings it to rest."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trainers = [Trainer(world), Trainer(world)]
        self.restarting = asyncio.Lock()
        self._rollouts = 0
        folder = write_adapter(world.folder / "adapter")
        known = SimAdapters(1, max_lora_rank=16)
        known.load("a", str(folder))
        self._digest = known.listed[0].digest
        world.adapters["a"] = folder

    async def gateway(self) -> Gateway:
        await self.world.up.wait()
        assert self.world.gateway is not None
        return self.world.gateway

    async def play(self, steps: list[Step]) -> None:
        tasks = []
        for step in steps:
            await asyncio.sleep(step.after)
            tasks.append(asyncio.create_task(self._played(step), name=repr(step)))
        ends, late = asyncio.get_running_loop().time() + _LONGEST_CALL_S, set(tasks)
        while late and asyncio.get_running_loop().time() < ends:
            await self._rest()
            _, late = await asyncio.wait(late, timeout=_REST_S)
        if late:
            raise Violation(f"these never end: {sorted(task.get_name() for task in late)}")
        for task in tasks:
            task.result()
        await self._settle()

    async def _played(self, step: Step) -> None:
        with suppress(RolloutGatewayError, GatewayDied):
            await step.play(self)
        self.world.look()

    async def roll(self, tokens: int, *, streamed: bool = False, adapter: str = "") -> None:
        """One rollout, checked token by token. A client tries again where its gateway died."""
        self._rollouts += 1
        number = self._rollouts
        gateway = await self.gateway()
        prompt = [3 + number % 7] * 20
        body = {"model": adapter or "sim", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        prompts = gateway.completions.decode(body, f"rollout-{number}")

        async def stream() -> Any:
            whole: dict[str, Any] = {"token_ids": []}

            def show(chunk: dict[str, Any]) -> None:
                for choice in opened(chunk["choices"]):
                    whole["token_ids"] += choice["token_ids"]
                    whole.update({key: value for key, value in choice.items() if key != "token_ids"})

            await gateway.completions.stream(prompts, [], show)
            return {"choices": [whole]}

        reply = await gateway.call(stream() if streamed else gateway.completions.generate(prompts))
        self.world.check(reply["choices"][0], prompt, tokens, self._digest if adapter else "")

    async def _rest(self) -> None:
        """Hosts go on, and nothing stays paused."""
        await asyncio.sleep(1.0)
        for _ in range(_FINAL_TRIES):
            for engine in self.world.engines.values():
                engine.go_on()
            gateway = await self.gateway()
            with suppress(RolloutGatewayError, GatewayDied):
                await gateway.call(gateway.weights.pauses.resume())
                return
            await asyncio.sleep(3.0)
        raise Violation("/resume fails for ever")

    async def _settle(self) -> None:
        await self._rest()
        gateway = await self.gateway()
        await self._until(lambda: self._is_settled(gateway, may_wait=True), "the fleet settles")
        if not self.world.has_lost_a_gateway:  # its engines drop tensors at the next question for room
            engines = self.world.engines
            await self._until(lambda: not any(one.staged for one in engines.values()), "received tensors are dropped")
        version = gateway.fleet.version
        for replica in gateway.fleet.replicas:
            label = self.world.engines[replica.replica_id].server.scheduler.version
            if replica.can_serve and WeightLabel.read(label) != WeightLabel(gateway.fleet.label, gateway.fleet.label):
                raise Violation(f"{replica.replica_id} serves version {version}, and is labelled {label}")
        await self._last_push(gateway)
        await self._until(lambda: self._is_settled(gateway, may_wait=False), "every replica serves the last push")
        await asyncio.gather(*(self.roll(30) for _ in range(2 * len(self.world.engines))))
        await self._check_nothing_leaks(gateway)

    async def _last_push(self, gateway: Gateway) -> None:
        plain = {"partial": False, "bad": False}
        for _ in range(_FINAL_TRIES):
            try:
                await Trainer(self.world).push(gateway, "store", in_flight=None, slow_s=0.0, **plain)
                return
            except RolloutGatewayError as error:
                last = error
            await asyncio.sleep(5.0)
        raise Violation(f"no push succeeds any more: {last!r}")

    def _is_settled(self, gateway: Gateway, *, may_wait: bool) -> bool:
        """True where every replica serves; with `may_wait` one whose version no store has may wait for the next."""
        fleet = gateway.fleet
        lacks = may_wait and fleet.version and fleet.version not in gateway.snapshots.versions
        done = [one.can_serve or (lacks and one.state is ReplicaState.SYNCING) for one in fleet.replicas]
        is_idle = gateway.weights.update is None and not gateway.server.scheduler.closed_for
        are_alive = not any(engine.is_dead for engine in self.world.engines.values())
        return is_idle and are_alive and all(done) and len(done) == len(self.world.engines) == self.world.wanted

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        ends = asyncio.get_running_loop().time() + SETTLE_S
        while not condition():
            if asyncio.get_running_loop().time() > ends:
                gateway = self.world.gateway
                assert gateway is not None
                states = [
                    f"{one.replica_id} {one.state} {one.weight_version} ({one.reason}), held by "
                    f"{sorted(one.brake.holders)}"
                    for one in gateway.fleet.replicas
                ]
                raise Violation(
                    f"not within {SETTLE_S:g} s: {what}; version {gateway.fleet.version}, store "
                    f"{gateway.snapshots.versions}, gate {gateway.server.scheduler.closed_for}, update "
                    f"{gateway.weights.update}, {states}"
                )
            await asyncio.sleep(0.5)

    async def _check_nothing_leaks(self, gateway: Gateway) -> None:
        await asyncio.sleep(2.0)
        await gateway.call(gateway.snapshots.make_room(gateway.fleet.version))
        await asyncio.sleep(2.0)
        left = sorted(path.name for path in gateway.snapshots.folder.iterdir() if path.is_dir())
        if left != [f"v{gateway.fleet.label}"]:
            raise Violation(f"the store keeps {left}, and {gateway.fleet.version} is served")
        if gateway.server.failure:
            raise Violation(gateway.server.failure)
        await gateway.stop()
        if gateway.tasks:
            raise Violation(f"tasks outlive their gateway: {[task.get_name() for task in gateway.tasks]}")
        for engine in self.world.engines.values():
            if engine.is_paused:
                raise Violation(f"{engine.info.incarnation} is paused when its gateway has ended")
            if engine.staged:
                raise Violation(f"{engine.info.incarnation} still has {engine.staged} staged")
