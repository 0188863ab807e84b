"""What vLLM's start does at once: with a played API process. A real engine starts so in `test_real_warm_start.py`."""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm import quick_start

APP, OTHER_APP = object(), object()


class Client:
    """Stands for vLLM's client of the engine, which waits for it in its constructor."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config="model")
        self._start_mm_warmup()

    def _start_mm_warmup(self) -> None: ...


async def app_of(tasks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the app of an API process whose engine can do `tasks`, and the builds; one before the engine is ready."""
    core_client = pytest.importorskip("vllm.v1.engine.core_client")
    monkeypatch.setattr(core_client, "MPClient", Client)
    monkeypatch.setattr(Client, "_start_mm_warmup", Client._start_mm_warmup)
    built: list[tuple[Any, ...]] = []
    is_built = threading.Event()

    def build_app(*asked: Any) -> object:
        built.append(asked)
        is_built.set()
        return APP if len(built) == 1 else OTHER_APP

    served = []

    async def run_server_worker(address: str, sock: Any, args: Any, client_config: Any = None) -> None:
        client = Client()
        assert is_built.wait(10), "nothing was built while the engine started"
        served.append(server.build_app(args, tasks, client.vllm_config.model_config))

    server: Any = SimpleNamespace(run_server_worker=run_server_worker, build_app=build_app)
    quick_start._build_routes_early(server)
    await server.run_server_worker("address", None, "args", {})
    return served[0], built


async def test_routes_are_built_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    app, built = await app_of(("generate",), monkeypatch)
    assert app is APP
    assert built == [("args", ("generate",), "model")]


async def test_an_engine_that_can_do_more_has_its_own_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    app, built = await app_of(("generate", "transcription"), monkeypatch)
    assert app is OTHER_APP
    assert built[1] == ("args", ("generate", "transcription"), "model")


def test_the_capability_of_a_gpu_is_known_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    platforms = pytest.importorskip("vllm.platforms")
    cuda: Any = ModuleType("vllm.platforms.cuda")
    cuda.NvmlCudaPlatform = SimpleNamespace  # the CPU build cannot import vLLM's
    monkeypatch.setitem(sys.modules, "vllm.platforms.cuda", cuda)
    played = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(platforms, "current_platform", played)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ("asked CUDA of", device))
    is_initialized = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    quick_start._name_gpu_without_cuda()
    assert torch.cuda.get_device_capability(0) == (9, 0)
    is_initialized = True
    assert torch.cuda.get_device_capability(1) == ("asked CUDA of", 1)
