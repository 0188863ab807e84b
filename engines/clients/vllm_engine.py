"""A vLLM server over HTTP. The simulated engine has the same routes and the same client."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from engines.clients.http import HttpEngine
from engines.engine import Json
from engines.errors import EngineFailed, EngineRefused
from engines.types import PauseMode
from engines.weight_label import open_label


class VllmEngine(HttpEngine):
    """One vLLM server (tested with 0.32)."""

    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        return await self._call(method, path, body, timeout_s)

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        return await self.ask("POST", path, body | {"stream": False}, timeout_s)

    async def reply(self, path: str, body: Json, timeout_s: float) -> bytes:
        return await self.read("POST", path, body | {"stream": False}, timeout_s)

    def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        return self._events(path, body | {"stream": True}, timeout_s)

    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        info = {"packed": True} | init_info  # trainers beside vLLM before 0.28 say it later, and always pack
        await self.ask("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout_s)

    async def close_weight_group(self, timeout_s: float) -> None:
        await self.ask("POST", "/shutdown_weight_transfer_engine", None, timeout_s)

    async def start_weight_update(self, timeout_s: float) -> None:
        await self._label("", timeout_s)
        await self.ask("POST", "/start_weight_update", {}, timeout_s)

    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        await self.ask("POST", "/update_weights", self._receive(update_info, timeout_s), timeout_s)

    async def finish_weight_update(self, label: str, timeout_s: float) -> None:
        text = open_label(label, self._committed)
        self._held = None
        await self.ask("POST", "/finish_weight_update", {"weight_version": text}, timeout_s)
        self._held = text

    async def abandon_weight_update(self, timeout_s: float) -> None:
        if self._has_tee:
            await self._on_workers("end_update", {}, timeout_s)  # in one pause between two steps
        else:
            # vLLM has no route to abandon an update. A finish without a version closes the session; if that is closed
            # already, vLLM answers 500 and nothing is left to do.
            with contextlib.suppress(EngineFailed):
                await self.ask("POST", "/finish_weight_update", {}, timeout_s)
        await self._label("", timeout_s)

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        await self.ask("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", None, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self.ask("POST", "/resume", None, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        return bool((await self.ask("POST", "/reset_prefix_cache", None, timeout_s)).get("success", True))

    async def wipe_kv(self, timeout_s: float) -> None:
        await super().wipe_kv(timeout_s)
        await self._forget_encodings(timeout_s)

    async def load_lora_adapter(self, name: str, path: str, timeout_s: float) -> None:
        # Never in place: vLLM would then read the folder again for every batch, under running requests.
        await self.read("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s)

    async def unload_lora_adapter(self, name: str, timeout_s: float) -> None:
        try:
            await self.read("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s)
        except EngineRefused as error:
            if error.status != 404:
                raise

    def _receive(self, update_info: Json, timeout_s: float) -> Json:
        return {"update_info": {key: value for key, value in update_info.items() if key != "packed"}}

    async def _load_by_itself(self, path: str, timeout_s: float) -> None:
        await self._on_workers("reload_weights", {"weights_path": path}, timeout_s)
        await self._forget_encodings(timeout_s)

    async def _forget_encodings(self, timeout_s: float) -> None:
        """Have workers and scheduler forget what the weights made of images. An engine whose workers alone have, as in
        vLLM's reload, ends at the next request with such an image."""
        with contextlib.suppress(EngineRefused):  # vLLM without the route
            await self.read("POST", "/reset_encoder_cache", None, timeout_s)

    async def _on_workers(self, method: str, arguments: Json, timeout_s: float) -> list[Any]:
        body = {"method": method, "kwargs": arguments, "timeout": timeout_s}
        answer = await self.ask("POST", "/collective_rpc", body, timeout_s)
        return self._translated(lambda told: list(told["results"]), answer)

    async def _told_label(self, timeout_s: float) -> str:
        return self._translated(label_of, await self.ask("GET", "/weight_info", None, timeout_s))

    async def _set_label(self, label: str, timeout_s: float) -> None:
        await self.ask("POST", "/update_weight_version", {"new_version": label}, timeout_s)


def label_of(answer: Json) -> str:
    """Return the label in an answer about weights. Raise `KeyError` or `TypeError` where there is none."""
    label = answer["weight_version"]
    if type(label) not in (str, int):
        raise TypeError(f"a label is text, not {type(label).__name__}")
    return str(label)
