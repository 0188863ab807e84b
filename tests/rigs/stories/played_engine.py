"""The simulated engine with weights that have content, called without sockets: for tests in virtual time.

Its model computes with the content of its tensors, whatever version it reports, so that a token shows the weights that
made it. Clients, routes, scheduler and worker are those of the simulated engine.
"""

import asyncio
import contextvars
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from engines.checkpoint.folder import read_spans
from engines.clients.connections import CannotConnect
from engines.clients.http import HttpEngine
from engines.clients.vllm_engine import VllmEngine
from engines.config import SimConfig
from engines.engine import Engine, Json, Take
from engines.errors import WeightUpdateConflict
from engines.reading.server import read
from engines.store.draft import RawTensor, raw
from engines.store.manifest import digest_of
from engines.types import EngineKind, ReplicaInfo, TensorMeta
from sim import server as sim_server
from sim.adapters import SimAdapters
from sim.dialect import Limits
from sim.model import SimModel
from sim.scheduler import BLOCK_TOKENS, PrefixCache, Sample
from sim.server import SimServer
from sim.worker import SimWorker

NAMES = ("b", "w")
ELEMENTS = 64
SIM = SimConfig(
    tensors={name: [ELEMENTS] for name in NAMES}, decode_step_s=0.05, decode_step_per_seq_s=0.0, load_s=0.05
)
Content = tuple[float, ...]
"""The value of each tensor, in the order of `NAMES`: the number of the push that sent it."""
CHECKPOINT: Content = (0.0, 0.0)


def tensor_bytes(value: float) -> bytes:
    """All elements have the value but the first."""
    return struct.pack(f"<{ELEMENTS}f", value, *[7.0] * (ELEMENTS - 1))


def raw_tensor(name: str, value: float) -> RawTensor:
    return raw(name, "float32", [ELEMENTS], tensor_bytes(value))


def read_content(folder: Path) -> Content:
    """The content of a version's folder."""
    values: dict[str, float] = {}
    for file, spans in read_spans(folder).items():
        content = (folder / file).read_bytes()
        values |= {span.name: struct.unpack_from("<f", content, span.begin)[0] for span in spans}
    return tuple(values[name] for name in NAMES)


def is_bad(content: Content) -> bool:
    """True for weights that every engine's canary refuses."""
    return any(value % 1 for value in content)


def key(content: Content) -> str:
    return repr(content)


class Wire:
    """The tensors of one trainer's group: `send` has them arrive everywhere, `close` breaks the group."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._arrived: dict[str, asyncio.Event] = {}

    def send(self, values: Mapping[str, float]) -> None:
        self.values |= values
        for name in values:
            self._event(name).set()

    def announce(self) -> None:
        self._arrived.clear()

    async def receive(self, name: str) -> float:
        await self._event(name).wait()
        return self.values[name]

    def _event(self, name: str) -> asyncio.Event:
        return self._arrived.setdefault(name, asyncio.Event())


class _Held(dict[str, str]):
    """The model's weights by label: what the engine holds, whatever the label."""

    def __init__(self, engine: "PlayedEngine") -> None:
        super().__init__()
        self._engine = engine

    def get(self, label: str, default: Any = None) -> str:
        return key(self._engine.content)


class _Cache(PrefixCache):
    """A prefix cache that knows the weights that wrote each block. `foreign` has (wrote, reads) of each hit on a block
    of other weights."""

    def __init__(self, engine: "PlayedEngine") -> None:
        super().__init__(SIM.kv_tokens)
        self._engine = engine
        self._wrote: dict[int, Content] = {}
        self.foreign: list[tuple[Content, Content]] = []

    def remember(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._wrote |= {block: self._engine.content for block in blocks if block not in self._blocks}
        super().remember(blocks)

    def lookup(self, sample: Sample) -> int:
        hit, reads = super().lookup(sample), self._engine.content
        wrote = [self._wrote[block] for block in sample.prompt_blocks[: hit // BLOCK_TOKENS]]
        self.foreign.extend((one, reads) for one in wrote if one != reads)
        return hit


class _Worker(SimWorker):
    def __init__(self, engine: "PlayedEngine", stage_bytes: int) -> None:
        super().__init__("sim", SIM.tensors, stage_bytes)
        self._engine = engine

    def _load(self, path: str) -> None:
        super()._load(path)
        engine = self._engine
        engine.loaded = CHECKPOINT if path == "sim" else read_content(Path(path))
        engine.content = (engine.loaded[0], engine.content[1])  # tensor after tensor

    def _zeros(self, name: str, shape: list[int]) -> RawTensor:
        value = self._engine.staged.get(name, self._engine.content[NAMES.index(name)])
        tensor = raw_tensor(name, value + 1024 * (name in self._damaged))
        return replace(tensor, digest=digest_of(tensor.bytes))


class _Server(SimServer):
    def __init__(self, engine: "PlayedEngine", seed: int, load_s: float, stage_bytes: int) -> None:
        limits = Limits(max_model_len=256, seed=seed, stream_interval=4, shows_cached_tokens=False, logprob_noise=0.0)
        super().__init__(
            "sim",
            SIM.model_copy(update={"load_s": load_s}),
            limits,
            max_num_seqs=8,
            world_size=1,
            adapters=SimAdapters(2, max_lora_rank=16),
        )
        self._engine = engine
        object.__setattr__(self._model, "held", _Held(engine))
        self.worker = self._weights._worker = _Worker(engine, stage_bytes)
        self.scheduler.cache = self.cache = _Cache(engine)

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        reply = await super().init_weight_transfer_engine(request)
        port = json.loads(await request.read())["init_info"]["master_port"]
        self._engine.join(port)
        return reply

    async def shutdown_weight_transfer_engine(self, request: web.Request) -> web.Response:
        self._engine.leave()
        return await super().shutdown_weight_transfer_engine(request)

    async def update_weights(self, request: web.Request) -> web.Response:
        info = json.loads(await request.read())["update_info"]
        await self._engine.receive(info["names"])
        return await super().update_weights(request)

    async def _on_workers(self, method: str, arguments: Any) -> Any:
        if method == "stage_weights":
            self._engine.begin_stage(self._stage(arguments))
            return None
        if method == "staged":
            return {"ready": self._engine.is_staged}
        if method in ("drop_receipt", "open_receipt", "room_to_stage", "load_snapshot"):
            self._engine.drop_staged()
        answer = await super()._on_workers(method, arguments)
        if method == "load_snapshot":
            self._engine.take_loaded()
        if method == "load_staged":
            await self._engine.take_staged()
        return answer

    async def _stage(self, arguments: Any) -> None:
        await self._engine.receive(arguments["update_info"]["names"], beside=True)
        await super()._on_workers("stage_weights", arguments)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        reply = await super().completions(request)
        if is_bad(self._engine.content) and "prompt_logprobs" in json.loads(await request.read()):
            assert isinstance(reply, web.Response)
            body = json.loads(reply.body)  # type: ignore[arg-type]
            scores = body["choices"][0]["prompt_logprobs"] or []  # none of an aborted request
            for scored in scores[1:]:
                for entry in scored.values():
                    entry["logprob"] = None  # NaN in JSON
            return web.Response(body=json.dumps(body).encode())
        return reply


class PlayedEngine:
    """One engine process. `kill` ends it; `stop` and `go_on` are SIGSTOP and SIGCONT of its host."""

    def __init__(
        self,
        replica_id: str,
        incarnation: int,
        wires: Mapping[int, Wire],
        latency: Callable[[], float],
        load_s: float,
        stage_bytes: int = 0,
    ) -> None:
        self.content: Content = CHECKPOINT
        self.loaded: Content | None = None
        self.staged: dict[str, float] = {}
        self._staging: asyncio.Task[None] | None = None
        self._wires = wires
        self._wire: Wire | None = None
        self._left = asyncio.Event()
        self._latency = latency
        self.is_dead = False
        self.has_served = False
        self._runs = asyncio.Event()
        self._runs.set()
        self._context = contextvars.Context()
        self._handlers: set[asyncio.Task[Any]] = set()
        self.server = _Server(self, incarnation, load_s, stage_bytes)
        self.info = ReplicaInfo(
            replica_id=replica_id,
            incarnation=f"{replica_id}@{incarnation}",
            group="engine",
            kind=EngineKind.SIM,
            url=f"http://127.0.0.1:{incarnation}",
            model="sim",
            world_size=1,
            max_model_len=256,
            max_num_seqs=8,
            engine_version="0.32.0+sim",
            streams=True,
            has_tee=True,
            capabilities=frozenset({"/init_weight_transfer_engine", "/v1/load_lora_adapter"}),
            tensors=tuple(TensorMeta(name=name, dtype="float32", shape=(ELEMENTS,)) for name in NAMES),
        )

    def start(self) -> "PlayedEngine":
        self.server._generation = self._spawn(self.server.scheduler.run())
        return self

    @property
    def version(self) -> str:
        return self.server.scheduler.version

    @property
    def is_paused(self) -> bool:
        return self.server.scheduler.paused is not None

    @property
    def model(self) -> SimModel:
        return self.server._model

    def foreign_kv(self) -> list[tuple[Content, Content]]:
        """Return, once, the weights (wrote, reads) of each hit on KV of other weights."""
        found, self.server.cache.foreign = self.server.cache.foreign, []
        return found

    def take_loaded(self) -> None:
        """Hold what was read from a folder."""
        self.content, self.loaded = self.loaded or self.content, None

    def begin_stage(self, work: Coroutine[Any, Any, None]) -> None:
        self._staging = self._spawn(work)

    @property
    def is_staged(self) -> bool:
        """True once the announced tensors are here. Raises the error of their receiver."""
        if self._staging is None or not self._staging.done():
            return False
        self._staging.result()
        return True

    def drop_staged(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
        self._staging, self.staged = None, {}

    async def take_staged(self) -> None:
        """Hold the staged tensors, one after the other."""
        if not self.is_staged:
            raise WeightUpdateConflict("load_staged without staged tensors")
        for name, value in self.staged.items():
            self._put(name, value)
            await asyncio.sleep(self._latency())
        self.drop_staged()

    def _put(self, name: str, value: float) -> None:
        values = dict(zip(NAMES, self.content, strict=True)) | {name: value}
        self.content = tuple(values[one] for one in NAMES)

    def join(self, port: int) -> None:
        self._wire, self._left = self._wires.get(port), asyncio.Event()

    def leave(self) -> None:
        self._wire = None
        self._left.set()

    async def receive(self, names: list[str], *, beside: bool = False) -> None:
        """Take tensors as they come, `beside` the weights or into them; fails when the group is left meanwhile."""
        wire, left = self._wire, self._left
        if wire is None:
            raise WeightUpdateConflict("not in a group")
        for name in names:
            arriving = asyncio.ensure_future(wire.receive(name))
            leaving = asyncio.ensure_future(left.wait())
            try:
                await asyncio.wait([arriving, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise WeightUpdateConflict("the group was left")
                value = arriving.result()
            finally:
                arriving.cancel()
                leaving.cancel()
            if beside:
                self.staged[name] = value
            else:
                self._put(name, value)
            await asyncio.sleep(self._latency())

    def kill(self) -> None:
        self.is_dead = True
        self.server._generation.cancel()  # type: ignore[union-attr]
        for task in self._handlers:
            task.cancel()
        self._runs.set()

    def stop(self) -> None:
        self._runs.clear()
        self.server.injector.faults = self.server.injector.faults.model_copy(update={"wedged": True})

    def go_on(self) -> None:
        self._runs.set()
        self.server.injector.faults = self.server.injector.faults.model_copy(update={"wedged": False})

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        return task

    @asynccontextmanager
    async def answer(self, method: str, path: str, body: bytes) -> AsyncIterator["_Response"]:
        """What a client of its port gets."""
        await asyncio.sleep(self._latency())
        if self.is_dead:
            raise _refused()
        request, pipe = _Request(method, path, body), _Pipe()
        request._payload_writer = pipe
        handling = self._spawn(self._handle(request, pipe))
        try:
            yield await self._first(handling, pipe)
        finally:
            handling.cancel()

    async def _first(self, handling: asyncio.Task[Any], pipe: "_Pipe") -> "_Response":
        begun = asyncio.ensure_future(pipe.begun.wait())
        try:
            await asyncio.wait([handling, begun], return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if pipe.begun.is_set():
            return _Response(200, pipe)
        if handling.cancelled() or self.is_dead:
            raise ConnectionResetError
        reply = handling.result()
        pipe.write_now(bytes(reply.body or b""))
        pipe.end()
        return _Response(reply.status, pipe)

    async def _handle(self, request: "_Request", pipe: "_Pipe") -> web.StreamResponse:
        await self._runs.wait()
        handler = getattr(self.server, _handlers(self.server)[request.method, request.path])

        async def inner(given: Any) -> web.StreamResponse:
            return await self.server.injector.inject(given, handler)

        try:
            reply = await sim_server._vllm_errors(request, inner)  # type: ignore[arg-type]
            await self._runs.wait()
        except BaseException:
            pipe.end(broken=True)
            raise
        if pipe.begun.is_set():
            pipe.end()
        return reply


_HANDLERS: dict[tuple[str, str], str] = {}


def _handlers(server: SimServer) -> dict[tuple[str, str], str]:
    """Names of the server's methods by route: an application a server takes long to make."""
    if not _HANDLERS:
        for route in server.app().router.routes():
            assert route.resource is not None
            _HANDLERS[route.method, route.resource.canonical] = route.handler.__name__
    return _HANDLERS


def _refused() -> CannotConnect:
    return CannotConnect("127.0.0.1:1", ConnectionRefusedError("nothing listens"))


class _Request:
    """As much of aiohttp's request as the simulated engine reads."""

    version = aiohttp.HttpVersion11
    keep_alive = True
    _payload_writer: Any

    def __init__(self, method: str, path: str, body: bytes) -> None:
        split = urlsplit(path)
        self.method, self.path, self.query, self._body = method, split.path, dict(parse_qsl(split.query)), body
        self.body_exists = bool(body)

    async def read(self) -> bytes:
        return self._body

    async def _prepare_hook(self, _: Any) -> None:
        """No signal."""


class _Pipe:
    """The body of an answer on its way: what the handler writes, and the client reads."""

    length: int | None = None

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._blocks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_broken = False

    def enable_chunking(self) -> None: ...

    def send_headers(self) -> None: ...

    async def write_headers(self, *_: Any) -> None:
        self.begun.set()

    async def write(self, block: bytes) -> None:
        self._blocks.put_nowait(bytes(block))

    def write_now(self, block: bytes) -> None:
        self._blocks.put_nowait(block)

    def end(self, *, broken: bool = False) -> None:
        self._is_broken = self._is_broken or broken
        self._blocks.put_nowait(None)

    async def block(self) -> bytes:
        if (block := await self._blocks.get()) is not None:
            return block
        if self._is_broken:
            raise ConnectionResetError("the connection was cut")
        return b""


class _Response:
    headers: CIMultiDict[str] = CIMultiDict()

    def __init__(self, status: int, content: _Pipe) -> None:
        self.status = status
        self.block = content.block

    async def read(self) -> bytes:
        blocks = []
        while block := await self.block():
            blocks.append(block)
        return b"".join(blocks)


class _Connections:
    """Stands where the client's connections do. `is_dead` is True once the client's process was killed."""

    def __init__(self, engine: PlayedEngine, is_dead: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_dead = is_dead
        self.closed = False

    async def close(self) -> None:
        self.closed = True

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, data: bytes | None, timeout_s: float, **_: Any
    ) -> AsyncIterator[_Response]:
        if self._is_dead():
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(loop.time() + timeout_s):
            async with self._engine.answer(method, path, data or b"") as response:
                yield response


class _Reader:
    """Asks an engine in the task that asks: what is played has no sockets."""

    def __init__(self, engine: "PlayedClient") -> None:
        self._engine = copy(engine)

    async def read(self, path: str, body: Json, timeout_s: float, take: Take, *, is_whole: bool, streams: bool) -> None:
        await read(self._engine, path, body, timeout_s, take, is_whole=is_whole)

    async def call(self, method: str, path: str, body: Json | bytes | None, timeout_s: float) -> bytes:
        return await self._engine.read(method, path, body, timeout_s)

    async def close(self) -> None:
        pass


class _Unconnected(HttpEngine):
    def __init__(self, replica_id: str, url: str, api_key: str = "", *, has_tee: bool = False) -> None:
        Engine.__init__(self, replica_id, url, has_tee=has_tee)


class PlayedClient(VllmEngine, _Unconnected):
    """The gateway's client of a played engine."""

    def __init__(self, engine: PlayedEngine, is_dead: Callable[[], bool]) -> None:
        info = engine.info
        super().__init__(info.replica_id, info.url, info.engine_version, has_tee=info.has_tee)
        self._connections = _Connections(engine, is_dead)  # type: ignore[assignment]
        self.beside = _Reader(self)
