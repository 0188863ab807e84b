"""The relay: receives a trainer's weights, writes them to the store.

    python -m engines.transfer.relay --port N --store FOLDER

A separate process, so that a blocked transfer ends with it. It has vLLM's weight routes for a receiver, receives like
vLLM's workers, and writes a draft of the weight store with their tee. Replicas then load the version.

It outlives the gateway, as its own end would break the trainer's group: between two updates the next gateway finds it
by its record in the store. It ends when its record is another's, and when no gateway keeps the store for a minute.
"""

import argparse
import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch
import uvloop
from aiohttp import web

from engines.checkpoint.names import CheckpointNames, announced_as, checkpoint_names
from engines.engine import Json, ReceiptCopy
from engines.errors import InvalidRequest, RolloutGatewayError, WeightUpdateFailed
from engines.store.weight_store import RELAY, is_kept, record_in
from engines.transfer.gloo import Receiver, WeightGroup
from engines.transfer.gpu_files import turns
from engines.transfer.packing import CHUNK_BYTES, NamedTensor, unpack_quickly
from engines.transfer.tee import Scribe, WeightTee, prepare

log = logging.getLogger("relay")

_MAX_BODY_BYTES = 256 << 20
_LOOK_S = 1.0
_LINGERS_S = 60.0
"""A gateway that was killed is back in seconds; the relay's GPU memory is somebody else's after that."""


class NoModel:
    """Takes the place of a worker's model: discards loaded tensors, which only a tee sees."""

    def load_weights(self, weights: Iterable[NamedTensor]) -> None:
        for _ in weights:
            pass


class GlooReceiver:
    """Receives into host memory, over TCP."""

    def __init__(self, model: NoModel) -> None:
        self._model = model
        self._receiver = Receiver()

    def join(self, init_info: Json) -> None:
        if not init_info.get("packed", True):
            raise InvalidRequest(
                "over gloo the relay receives only packed chunks, as from TRL's client and WeightSender: set packed to "
                "true",
                param="packed",
            )
        address, port = init_info["master_address"], init_info["master_port"]
        group = WeightGroup(address, port, init_info["rank_offset"], init_info["world_size"])
        self._receiver.join(group, init_info.get("packed_buffer_size_bytes", CHUNK_BYTES))

    def receive(self, update_info: Json) -> None:
        self._receiver.receive(update_info, self._model.load_weights)


class NcclReceiver:
    """Receives into GPU memory with the receiver of vLLM's workers: packed chunks, or tensor by tensor."""

    def __init__(self, model: NoModel, device: torch.device) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        torch.cuda.set_device(device)
        turns.release()  # two files leave the GPU at a time: no engine is slowed here
        unpack_quickly()
        # A receiver reads only its rank from vLLM's configuration; the relay is the only worker.
        place = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=place, model_config=None)
        self._engine = NCCLWeightTransferEngine(WeightTransferConfig(backend="nccl"), config, device, model)

    def join(self, init_info: Json) -> None:
        self._engine.shutdown()
        self._engine.init_transfer_engine(self._engine.init_info_cls(**init_info))

    def receive(self, update_info: Json) -> None:
        self._engine.receive_weights(self._engine.update_info_cls(**update_info))
        torch.cuda.synchronize()


class RelayServer:
    """The relay's routes. The gateway makes one call at a time, and ends the process after a failure."""

    def __init__(self, receiver: GlooReceiver | NcclReceiver, model: NoModel) -> None:
        self._receiver = receiver
        self._model = model
        self._tee: WeightTee | None = None
        self._scribe: Scribe | None = None
        self._running: asyncio.Future[Any] | None = None
        self._names = CheckpointNames()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_answer_errors])
        app.router.add_get("/health", self.health)
        app.router.add_post("/init_weight_transfer_engine", self.init_weight_transfer_engine)
        app.router.add_post("/update_weights", self.update_weights)
        app.router.add_post("/collective_rpc", self.collective_rpc)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return _json({})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        init_info = (await _object(request))["init_info"]
        for key in ("master_address", "master_port", "rank_offset", "world_size"):
            if init_info.get(key) is None:
                raise InvalidRequest(f"init_info.{key} is missing: it locates the trainer's group", param=key)
        self._drop()
        await self._in_thread(self._receiver.join, init_info)
        return _json({"message": "Weight transfer initialized"})

    async def update_weights(self, request: web.Request) -> web.Response:
        await self._in_thread(self._receiver.receive, (await _object(request))["update_info"])
        return _json({"message": "Weights updated"})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """Answer vLLM's route for the receipt methods of our worker extension."""
        asked = await _object(request)
        match asked["method"]:
            case "plan_updates":
                checkpoint = asked["kwargs"]
                names = [tensor["name"] for tensor in checkpoint["tensors"]]
                self._names = checkpoint_names(names, checkpoint["config"], checkpoint["tied"])
                threading.Thread(target=self._names.prepare, daemon=True).start()
                return _json({"results": [{"obstacle": ""}]})
            case "announced_as":
                announced = await asyncio.to_thread(announced_as, self._names, asked["kwargs"]["update_info"])
                return _json({"results": [announced]})
            case "open_receipt":
                self._drop()
                copy = ReceiptCopy(**asked["kwargs"])
                self._scribe = await asyncio.to_thread(Scribe.after, self._scribe, copy)
                self._tee = WeightTee(self._model, self._scribe, names=self._names)
            case "close_receipt":
                return _json({"results": [await self._in_thread(self._closed)]})
            case "drop_receipt":
                self._drop()
            case method:
                raise InvalidRequest(f"the relay has no method {method!r}", param="method")
        return _json({"results": [None]})

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of the work, which goes on where its caller is gone."""
        self._running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        return await asyncio.shield(self._running)

    def _closed(self) -> Json:
        tee, self._tee = self._tee, None
        digests = tee.close() if tee is not None else {}
        if self._scribe is not None:
            self._scribe.keep()
            self._scribe.join()  # all is written then: unlike a worker, a relay has no rollouts to serve
        return digests

    def _drop(self) -> None:
        """Forget the update. Raise where a call still waits for the trainer: only the end of the process ends it."""
        if self._running is not None and not self._running.done():
            raise WeightUpdateFailed("a call of the update before still waits for its trainer")
        tee, self._tee = self._tee, None
        if tee is not None:
            tee.remove()
        if self._scribe is not None:
            self._scribe.drop()


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except InvalidRequest as error:
        return _json(
            {"error": {"message": str(error), "type": "BadRequestError", "param": error.param, "code": 400}}, 400
        )
    except web.HTTPException:
        raise
    except Exception as error:  # a transfer may fail in any way, and the gateway has to hear of it
        log.exception("%s failed", request.path)
        message = str(error) if isinstance(error, RolloutGatewayError) else f"{type(error).__name__}: {error}"
        return _json({"error": {"message": message, "type": "InternalServerError", "code": 500}}, 500)


async def _end_with_store(store: Path, port: int) -> None:
    """Return when another relay has this one's place, or no gateway has kept the store for a while."""
    kept_at = time.monotonic()
    while record_in(store, RELAY).get("port") == port and time.monotonic() - kept_at < _LINGERS_S:
        if is_kept(store):
            kept_at = time.monotonic()
        await asyncio.sleep(_LOOK_S)


async def _object(request: web.Request) -> Any:
    return orjson.loads(await request.read())


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engines.transfer.relay", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="on loopback")
    parser.add_argument("--store", type=Path, required=True, help="folder of the weight store")
    parser.add_argument("--device", default="cpu", help="cpu receives over gloo, cuda:N over NCCL")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    model, device = NoModel(), torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: set weights.relay_device to cpu, or to a GPU of the gateway's node")
    prepare(device)
    receiver = GlooReceiver(model) if device.type == "cpu" else NcclReceiver(model, device)
    app = RelayServer(receiver, model).app()

    async def watching(_: web.Application) -> AsyncIterator[None]:
        watch = asyncio.create_task(_end_with_store(arguments.store, arguments.port))
        watch.add_done_callback(lambda task: None if task.cancelled() else os._exit(0))  # a thread may hang for ever
        yield
        watch.cancel()

    app.cleanup_ctx.append(watching)
    web.run_app(
        app,
        host="127.0.0.1",
        port=arguments.port,
        loop=uvloop.new_event_loop(),
        print=None,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.0,
    )


if __name__ == "__main__":
    main()
