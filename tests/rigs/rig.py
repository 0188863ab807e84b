"""A gateway over simulated engines, all in this process: real HTTP between every part, no Ray, no model."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from engines.clients.external import ExternalServer, connect
from engines.config import EngineConfig, SimConfig
from engines.reading.server import ReaderServer
from engines.store.draft import Draft, claim_draft, raw
from engines.types import EngineKind, ReplicaInfo, TensorMeta
from gateway.config.schema import Config
from gateway.fleet.adapter_loading import LOAD_ROUTE
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.http.listener import engine_client, listen
from gateway.http.server import GatewayServer
from sim.adapters import SimAdapters
from sim.dialect import Limits
from sim.faults import Faults
from sim.scheduler import SimScheduler
from sim.server import SimServer
from tests.rigs.calls import until

STORED = {"w": [4, 4], "b": [4]}
"""Tensors of a simulated engine, for tests of the weight store: the shapes by name."""
MAX_MODEL_LEN = 128
CAPABILITIES = {
    "/init_weight_transfer_engine", "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/inference/v1/generate",
}  # fmt: skip
FAST_WATCH = {
    "discover_interval_s": 0.05, "probe_interval_s": 0.05, "probe_timeout_s": 20.0, "lost_after_s": 0.5,
    "stalled_after_s": 600.0,  # tests stall engines
}  # fmt: skip
_READER_KEY = "key of readers"
_READERS_TELL_S = 0.01
_ROUNDS = 100
_KERNEL_S = 0.05
"""A kernel under load passes packets on a little later than the call that sent them."""

_TURNS_OF_AN_ACCEPT = 4
"""Turns of the loop after which a connection that was accepted is one of the server's: more than asyncio needs."""

Json = dict[str, Any]


class SimReplica:
    """One simulated engine with a listening port."""

    def __init__(
        self, replica_id: str, seed: int, sim: SimConfig, *, group: str = "engine", model: str = "sim", loras: int = 0
    ) -> None:
        limits = Limits(
            max_model_len=MAX_MODEL_LEN,
            seed=seed,
            stream_interval=4,
            shows_cached_tokens=False,
            logprob_noise=sim.logprob_noise,
        )
        adapters = SimAdapters(loras, max_lora_rank=16) if loras else None
        self._server = SimServer(model, sim, limits, max_num_seqs=8, world_size=1, adapters=adapters)
        self._server.injector.die = self._die
        self._dying: asyncio.Task[None] | None = None
        self._runner = web.AppRunner(self._server.app(), handler_cancellation=True, shutdown_timeout=0.01)
        self.info = ReplicaInfo(
            replica_id=replica_id,
            incarnation=f"{replica_id}@{id(self)}",
            group=group,
            kind=EngineKind.SIM,
            url="",
            model=model,
            world_size=1,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            engine_version="0.32.0+sim",
            streams=True,
            has_tee=True,
            capabilities=frozenset(CAPABILITIES | ({LOAD_ROUTE} if loras else set())),
            tensors=tuple(TensorMeta(name=n, dtype="float32", shape=tuple(s)) for n, s in sim.tensors.items()),
        )

    async def start(self) -> "SimReplica":
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.info = replace(self.info, url=f"http://127.0.0.1:{self._runner.addresses[0][1]}")
        return self

    @property
    def is_paused(self) -> bool:
        """True while its engine is paused, in any mode."""
        return self._server.scheduler.paused is not None

    def label(self, version: int, weights: str = "") -> None:
        """Has it report this version, as after an update whose gateway died before the verdict, or of another run with
        other `weights`."""
        if weights:
            self._server._model.held[str(version)] = weights
        self._server.scheduler.hold_version(str(version))

    def inject(self, **faults: Any) -> None:
        """From now on it has these faults (`sim.faults.Faults`), and no others."""
        self._server.injector.faults = Faults(**faults)

    @property
    def num_held(self) -> int:
        """Requests that a fault holds."""
        return self._server.injector.num_held

    @property
    def generated_tokens(self) -> int:
        """Tokens that it has made so far."""
        return self._server.scheduler.generated_tokens

    def damage(self, tensor: str) -> None:
        """From now on this tensor arrives with a wrong byte."""
        self._server.worker.damage(tensor)

    def hurry(self) -> None:
        """From now on its tokens take no time. Ends a stall."""
        self.scheduler.config = self.scheduler.config.model_copy(update={"decode_step_s": 0.0})
        self.scheduler.go_on()

    @property
    def scheduler(self) -> SimScheduler:
        return self._server.scheduler

    def refuse_adapters(self) -> None:
        """From now on it fails to load any LoRA adapter of more than rank 1, as a worker of vLLM's does: with 500."""
        assert self._server.adapters is not None
        self._server.adapters.config["max_lora_rank"] = 1

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that it knows."""
        return [adapter.name for adapter in self._server.adapters.listed] if self._server.adapters else []

    async def _die(self) -> None:
        """End in the middle of a request."""
        self._begin_to_end()
        await asyncio.Event().wait()

    async def kill(self) -> None:
        """Stop listening and cut every connection, as a process that dies does."""
        await asyncio.shield(self._begin_to_end())

    def _begin_to_end(self) -> "asyncio.Task[None]":
        self._dying = self._dying or asyncio.create_task(self._end())
        return self._dying

    async def _end(self) -> None:
        sites, loop = list(self._runner.sites), asyncio.get_running_loop()
        for listening in (socket for site in sites for socket in getattr(site, "_server").sockets):  # noqa: B009
            loop.remove_reader(listening.fileno())  # asyncio would lose what it has accepted when the listener closes
        for _ in range(_TURNS_OF_AN_ACCEPT):
            await asyncio.sleep(0)
        for site in sites:
            await site.stop()
        if self._runner.server is not None:
            for connection in self._runner.server.connections:
                connection.force_close()
                if connection.transport is not None:
                    connection.transport.abort()
        await self._runner.cleanup()


class Rig:
    """A running gateway, its simulated replicas and a client. Tests add and kill replicas through it.

    `odd` holds what single replicas do otherwise than `sim` says, by their ids. Engines are read beside them, as behind
    Serve.
    """

    def __init__(self, config: Config, sim: SimConfig, odd: dict[str, Json] | None = None) -> None:
        self.config = config
        self.sim = sim
        self.odd = odd or {}
        self.replicas: list[SimReplica] = []
        self.external: list[ReplicaInfo] = []
        self.readers: dict[str, ReaderServer] = {}
        """By replica; a fault that is put before an engine's tokens is put before a reader's engine."""
        self._all_readers: list[ReaderServer] = []
        self._addresses: dict[tuple[str, str], str] = {}
        self.fleet = Fleet(
            config,
            discover=self._discover,
            connect=lambda info: engine_client(config, info),
        )
        self._gateway = gateway = GatewayServer(config, self.fleet, Metrics())
        self._runner = web.AppRunner(gateway.application(), handler_cancellation=True, shutdown_timeout=0.1)
        self.client = aiohttp.ClientSession()
        self.url = ""

    async def start(self, replicas: "list[SimReplica] | None" = None) -> "Rig":
        """`replicas` run already, where given: those of a gateway that is gone."""
        self.replicas = replicas or []
        for group, engine in self.config.groups.items():
            if engine.kind is EngineKind.EXTERNAL:
                self.external.append(await described(engine, f"{group}-0", group))
                continue
            for index in range(engine.num_replicas if replicas is None else 0):
                await self.add_replica(f"{group}-{index}", seed=index)
        await self.listen()
        # On a busy machine the first look may find an engine too slow to answer it.
        async with asyncio.timeout(20):
            while len(self.fleet.replicas) + len(self.fleet.arrivals.refused) < len(self.replicas) + len(self.external):
                await asyncio.sleep(0.02)
        return self

    async def listen(self) -> "Rig":
        await self._runner.setup()
        gateway = self.config.gateway.model_copy(update={"port": 0})
        self._listening = await listen(self._runner, gateway)
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"
        return self

    async def add_replica(self, replica_id: str, seed: int = 0) -> SimReplica:
        """Start one of the group that `replica_id` begins with; in place of the one of the same id, if there is any."""
        group = replica_id.rpartition("-")[0]
        model = self.config.groups[group].served_name
        sim = SimConfig.model_validate(self.sim.model_dump() | self.odd.get(replica_id, {}))
        loras = self.config.groups[group].num_adapters
        replica = await SimReplica(replica_id, seed, sim, group=group, model=model, loras=loras).start()
        self.replicas = [other for other in self.replicas if other.info.replica_id != replica_id] + [replica]
        return replica

    @property
    def router(self) -> web.UrlDispatcher:
        """The gateway's table of routes."""
        return self._runner.app.router

    @property
    def num_connections(self) -> int:
        """Connections of clients that the gateway holds."""
        return len(self._runner.server.connections) if self._runner.server else 0

    def break_connections(self) -> None:
        """Reset the connections of all clients, as a proxy that dies does."""
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            assert connection.transport is not None
            connection.transport.abort()

    async def stop_gateway(self) -> None:
        """End the gateway; its replicas go on."""
        self._listening.close()
        await self._runner.cleanup()

    async def stop(self) -> None:
        await self.client.close()
        await self.stop_gateway()
        for replica in self.replicas:
            await replica.kill()
        for reader in self._all_readers:
            await reader.close()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Json]:
        async with self.client.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Json]:
        async with self.client.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: Json, **kwargs: Any) -> list[Json]:
        """The chunks of a stream that ends as one does."""
        async with self.client.post(self.url + path, json=body | {"stream": True}, **kwargs) as response:
            assert response.status == 200, await response.text()
            lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        assert lines.pop().strip() == b"[DONE]"
        return [orjson.loads(line) for line in lines]

    async def kill_loaded(self) -> "SimReplica":
        """Kill a replica that has samples in flight."""
        loaded = {replica.replica_id for replica in self.fleet.replicas if replica.load_samples}
        dead = next(replica for replica in self.replicas if replica.info.replica_id in loaded)
        await dead.kill()
        return dead

    async def load(self, name: str, path: Path) -> tuple[int, str]:
        """Status and text of the reply to TRL's call."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": False}
        async with self.client.post(f"{self.url}/v1/load_lora_adapter", json=body) as response:
            return response.status, await response.text()

    async def unload(self, name: str) -> tuple[int, str]:
        async with self.client.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": name}) as response:
            return response.status, await response.text()

    async def complete(self, prompt: Any, **sampling: Any) -> Json:
        """A completion that must succeed, with token ids."""
        body = {"model": "sim", "prompt": prompt, "return_token_ids": True, "max_tokens": 8, **sampling}
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        return reply

    async def open_group(self) -> None:
        _, size = await self.get("/get_world_size")
        info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "packed": True}
        info["world_size"] = size["world_size"] + 1
        status, reply = await self.post("/init_weight_transfer_engine", {"init_info": info})
        assert status == 200, reply

    async def update(self) -> None:
        """One whole weight update, as TRL calls it."""
        for path, body in (
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": self.tensors}),
            ("/finish_weight_update", {}),
            ("/reset_prefix_cache", None),
        ):
            status, reply = await self.post(path, body)
            assert status == 200, (path, reply)

    async def push(self, folder: Path, *, value: int = 0, **body: Any) -> tuple[int, Json]:
        """Push the only tensor through the store in `folder`, with this value in each of its bytes."""
        path, _ = claim_draft(folder)
        draft = Draft(path, "sim")
        draft.add([raw("weight", "float32", [4, 4], bytes([value] * 64))])
        draft.finish()
        return await self.post("/v1/weight_updates", {"transport": "store", "snapshot": path.name, **body})

    @property
    def tensors(self) -> Json:
        names = list(self.sim.tensors)
        return {"names": names, "dtype_names": ["float32"] * len(names), "shapes": list(self.sim.tensors.values())}

    async def states(self) -> dict[str, str]:
        _, status = await self.get("/status")
        return {replica["replica_id"]: replica["state"] for replica in status["replicas"]}

    async def in_line(self, count: int = 1) -> None:
        """Returns when so many rollouts wait for a replica."""
        await until(lambda: self.get("/status"), lambda got: got[1]["queue_length"] >= count)

    async def until(self, states: dict[str, str], timeout_s: float = 20.0) -> None:
        """Returns when the replicas are in these states."""
        await until(self.states, lambda found: found == states, timeout_s)

    async def begun(self, samples: int = 1, tokens: int = 6) -> None:
        """Returns when so many samples have this many tokens each and get no more until `hurry`, so that what a test
        does to them meets them in flight however long it takes. Stalls the engines."""
        for replica in self.replicas:
            replica.scheduler.stall(after=tokens)
        await until(lambda: sum(len(replica.scheduler.stalled) for replica in self.replicas) >= samples)
        for _ in range(_ROUNDS):  # engines and gateway share this loop: chunks that were written are read
            await asyncio.sleep(_KERNEL_S / _ROUNDS)

    def go_on(self) -> None:
        """End the stall that `begun` has begun; tokens take their time."""
        for replica in self.replicas:
            replica.scheduler.go_on()

    def hurry(self) -> None:
        """From now on tokens take no time, and no engine stalls."""
        for replica in self.replicas:
            replica.hurry()

    async def _discover(self) -> list[ReplicaInfo]:
        return [await self._read_beside(info) for info in [replica.info for replica in self.replicas] + self.external]

    async def _read_beside(self, info: ReplicaInfo) -> ReplicaInfo:
        """The replica with the reader of this start of its engine."""
        key = info.replica_id, info.incarnation
        if key not in self._addresses:
            self.readers[info.replica_id] = reader = ReaderServer(connect(info), _READER_KEY, every_s=_READERS_TELL_S)
            self._all_readers.append(reader)
            self._addresses[key] = await reader.open("127.0.0.1")
        return replace(info, reader=self._addresses[key], reader_key=_READER_KEY)


async def described(config: EngineConfig, replica_id: str, group: str) -> ReplicaInfo:
    """The description of the external server of `config`."""
    server = ExternalServer(config, replica_id=replica_id, group=group)
    info = await server.start()
    await server.stop()
    return info


StartRig = Callable[..., Awaitable[Rig]]
