"""A vLLM server over HTTP. The simulated engine speaks the same surface and is reached through this class too."""

import contextlib
from collections.abc import AsyncGenerator

from engines.engine import Json
from engines.errors import EngineFailed, EngineRefused
from engines.http import HttpEngine
from engines.types import PauseMode

_PACKED_AT_INIT = (0, 28)


class VllmEngine(HttpEngine):
    """One vLLM server (seen with 0.26 and 0.32).

    `engine_version` is the server's own; the latest dialect is spoken where it is not given. `api_key` is its bearer
    key, where it wants one.
    """

    def __init__(self, replica_id: str, url: str, engine_version: str = "", api_key: str = "") -> None:
        super().__init__(replica_id, url, api_key)
        # Trainers say `packed` in the place that the vLLM installed beside them has it, engines want it in their own.
        self._wants_packed_at_init = not engine_version or release(engine_version) >= _PACKED_AT_INIT
        self._packed = True

    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        return await self._call(method, path, body, timeout_s)

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        return await self.ask("POST", path, {**body, "stream": False}, timeout_s)

    def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        return self._events(path, {**body, "stream": True}, timeout_s)

    async def weight_version(self, timeout_s: float) -> int | None:
        try:
            version = str((await self.ask("GET", "/weight_info", None, timeout_s)).get("weight_version"))
        except EngineRefused:
            return None  # vLLM before weight versions
        return version_number(version)

    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        rest = {key: value for key, value in init_info.items() if key != "packed"}
        self._packed = init_info.get("packed", True)  # a trainer that says it later always packs
        info = rest | {"packed": self._packed} if self._wants_packed_at_init else rest
        await self.ask("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout_s)

    async def close_weight_group(self, timeout_s: float) -> None:
        await self.ask("POST", "/shutdown_weight_transfer_engine", None, timeout_s)

    async def start_weight_update(self, timeout_s: float) -> None:
        await self.ask("POST", "/start_weight_update", {}, timeout_s)

    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        rest = {key: value for key, value in update_info.items() if key != "packed"}
        info = rest if self._wants_packed_at_init else {"packed": self._packed} | update_info
        await self.ask("POST", "/update_weights", {"update_info": info}, timeout_s)

    async def finish_weight_update(self, version: int, timeout_s: float) -> None:
        await self.ask("POST", "/finish_weight_update", {"weight_version": str(version)}, timeout_s)

    async def abandon_weight_update(self, timeout_s: float) -> None:
        # vLLM has no word for it. A finish without a version closes the session; where a failed transfer has closed it
        # already, vLLM answers 500 and nothing is left to do.
        with contextlib.suppress(EngineFailed):
            await self.ask("POST", "/finish_weight_update", {}, timeout_s)

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        await self.ask("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", None, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.ask("POST", "/resume", None, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        return bool((await self.ask("POST", "/reset_prefix_cache", None, timeout_s)).get("success", True))


def release(version: str) -> tuple[int, int]:
    """Major and minor of a vLLM version such as "0.32.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def version_number(label: str) -> int:
    """vLLM's versions are labels; ours are numbers. It calls the weights it started with "default"."""
    return int(label) if label.isdigit() else 0
