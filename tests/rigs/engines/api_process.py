"""An API process of vLLM without a server: its real list of models, before an engine that takes any adapter."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")  # as vLLM starts its own
_ADDING_S = 0.2


class ApiProcess:
    """The process; `send` calls several of its methods at the same time, and `results` waits for their ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, *calls: tuple[str, str, str]) -> None:
        self._connection.send(calls)

    def results(self) -> list[Any]:
        assert self._connection.poll(120)
        return list(self._connection.recv())

    def call(self, method: str, name: str = "", path: str = "") -> Any:
        self.send((method, name, path))
        return self.results()[0]


@contextmanager
def api_process(index: int, env: Mapping[str, str]) -> Iterator[ApiProcess]:
    """Start a process as vLLM would: with its name, and with our plugin."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_run, args=(theirs, dict(env)), name=f"ApiServer_{index}", daemon=True)
    process.start()
    theirs.close()
    try:
        yield ApiProcess(ours)
    finally:
        ours.close()
        process.join(30)


def _run(calls: Connection, env: dict[str, str]) -> None:
    os.environ.update(env)
    from engines.inside_vllm.plugin import register

    register()
    asyncio.run(_serve(calls))


async def _serve(calls: Connection) -> None:
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    async def add_lora(_: Any) -> None:
        await asyncio.sleep(_ADDING_S)

    config = SimpleNamespace(model="base", max_model_len=8)
    engine = SimpleNamespace(model_config=config, renderer=None, input_processor=None, add_lora=add_lora)
    models = OpenAIServingModels(engine, [BaseModelPath(name="base", model_path="base")])
    methods = _Methods(models)
    while True:
        try:
            asked = await asyncio.to_thread(calls.recv)
        except EOFError:
            return
        calls.send(await asyncio.gather(*(getattr(methods, method)(name, path) for method, name, path in asked)))


class _Methods:
    """Calls of the routes, with replies of plain types."""

    def __init__(self, models: Any) -> None:
        from vllm.entrypoints.serve.engine.serving import BaseServing

        self._models = models
        self._serving = BaseServing(models, models.model_config)

    async def load(self, name: str, path: str) -> int:
        return await self._load(name, path, in_place=False)

    async def load_in_place(self, name: str, path: str) -> int:
        return await self._load(name, path, in_place=True)

    async def _load(self, name: str, path: str, *, in_place: bool) -> int:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path, load_inplace=in_place)
        return _status(await self._models.load_lora_adapter(request))

    async def unload(self, name: str, _: str) -> int:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        return _status(await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name)))

    async def use(self, name: str, _: str) -> Any:
        """What a completion with this model would use: the adapter's id and path, or the status of a refusal."""
        request = SimpleNamespace(model=name)
        if (error := await self._serving._check_model(request)) is not None:
            return error.error.code
        found = self._serving._maybe_get_adapters(request)
        return found and (found.lora_int_id, found.lora_path)

    async def listed(self, *_: str) -> list[str]:
        return [card.id for card in (await self._models.show_available_models()).data]

    async def routes(self, *_: str) -> list[str]:
        from fastapi import FastAPI
        from vllm.entrypoints.serve.lora.api_router import attach_router

        app = FastAPI()
        attach_router(app)
        return sorted(path for path in app.openapi()["paths"] if "lora" in path)


def _status(reply: Any) -> int:
    return 200 if isinstance(reply, str) else int(reply.error.code)
