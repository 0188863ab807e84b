"""An SGLang server over HTTP, behind vLLM's dialect (tested with 0.5.23).

`_ROUTES` has the routes. Beside them:

    POST /v1/completions                  see `sglang_dialect`
    POST /v1/chat/completions             structured_outputs becomes regex, ebnf or response_format
    GET /v1/models                        with the name of /server_info: SGLang lists the folder loaded last
    POST /pause mode=wait                 poll /v1/loads until nothing runs, then in_place
    POST /reset_prefix_cache              /flush_cache answers 400 while requests run
    load_snapshot without our plugin      /update_weights_from_disk
    model = an adapter's name             lora_path = that name

SGLang by itself supports neither vLLM's packed chunks nor its rendezvous. With our plugin in its workers
(`engines/inside_sglang`) it takes both, with digests and a copy for the store. Without the plugin it takes no trainer's
group, and loads versions of the store. It does so only without data parallelism.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from engines.clients.http import HttpEngine, message_of
from engines.clients.sglang_dialect import (
    CHAT,
    COMPLETIONS,
    CompletionReply,
    chat_body,
    chat_reply,
    error_body,
    generate_body,
    server_info,
    world_size,
)
from engines.clients.vllm_engine import label_of
from engines.engine import Json, Preparation
from engines.errors import DeadlineExceeded, EngineRefused, InvalidRequest
from engines.transfer.worker_calls import call_text
from engines.types import PauseMode, TensorMeta

_POLL_S = 0.05
_PACKING = {"chunk_bytes": "packed_buffer_size_bytes", "buffers": "packed_num_buffers"}
"""Our plugin's and vLLM's names."""
_SHARE = 0.9
"""Share of a call's time after which a worker gives up a collective, so that its answer is heard."""
_NO_TOKEN = 2**31 - 1
_LOAD_ROUTE = "/update_weights_from_disk"
_WORKERS = "/weights_checker"

# vLLM's routes that this client answers, and the SGLang route that each needs.
_ROUTES = {
    "/health": "/health",
    "/metrics": "/metrics",
    "/v1/models": "/v1/models",
    COMPLETIONS: "/generate",
    CHAT: CHAT,
    "/tokenize": "/v1/tokenize",
    "/detokenize": "/v1/detokenize",
    "/version": "/server_info",
    "/server_info": "/server_info",
    "/get_world_size": "/server_info",
    "/weight_info": "/model_info",
    "/pause": "/pause_generation",
    "/resume": "/continue_generation",
    "/reset_prefix_cache": "/flush_cache",
    "/init_weight_transfer_engine": _WORKERS,
    "/shutdown_weight_transfer_engine": _WORKERS,
    "/start_weight_update": _WORKERS,
    "/update_weights": _WORKERS,
    "/finish_weight_update": "/update_weight_version",
    "/v1/load_lora_adapter": "/load_lora_adapter",
    "/v1/unload_lora_adapter": "/unload_lora_adapter",
}


class SglangEngine(HttpEngine):
    """One SGLang server.

    has_tee: its workers run our plugin (`engines/inside_sglang`).
    """

    def __init__(self, replica_id: str, url: str, api_key: str = "", *, has_tee: bool = False) -> None:
        super().__init__(replica_id, url, api_key, has_tee=has_tee)
        self._vocab_size: int | None = None
        self._served_name = ""
        self._naming = asyncio.Lock()

    async def ask(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        route = path.partition("?")[0]
        if route == "/v1/models":
            return await self._models(timeout_s)
        answer = await self._call(method, _ROUTES.get(route, path), body, timeout_s)
        return self._translated(_ANSWERS.get(route, dict), answer)

    async def generate(self, path: str, body: Json, timeout_s: float) -> Json:
        with self._in_vllms_words():
            asked = await self._asked(path, body, timeout_s, stream=False)
            answer = await self._call("POST", _ROUTES[path], asked, timeout_s)
            return self._translated(chat_reply if path == CHAT else CompletionReply(body).whole, answer)

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        with self._in_vllms_words():
            asked = await self._asked(path, body, timeout_s, stream=True)
            reply = CompletionReply(body, replica_id=self.replica_id)
            async with aclosing(self._events(_ROUTES[path], asked, timeout_s)) as blocks:
                async for events in blocks:
                    if path == CHAT:
                        yield events
                        continue
                    for event in events:
                        answer = self._decoded("/generate", event)
                        if (translated := self._translated(reply.chunk, answer)) is not None:
                            yield [orjson.dumps(translated)]
            if path != CHAT and (body.get("stream_options") or {}).get("include_usage"):
                yield [orjson.dumps(reply.last())]

    async def _asked(self, path: str, body: Json, timeout_s: float, *, stream: bool) -> Json:
        """Return the body as SGLang takes it. A model of another name than the server's is an adapter."""
        await self._check_token_ids(body, timeout_s)
        asked = (chat_body(body) if path == CHAT else generate_body(body)) | {"stream": stream}
        if (model := body.get("model")) and model != await self._name(timeout_s):
            asked["lora_path"] = model
        return asked

    async def _told_label(self, timeout_s: float) -> str:
        return self._translated(label_of, await self._call("GET", "/model_info", None, timeout_s))

    async def open_weight_group(self, init_info: Json, timeout_s: float) -> None:
        if not init_info.get("packed", True):
            raise self._refusal("SGLang receives packed chunks alone: set packed to true", "packed")
        group = {
            "address": init_info["master_address"],
            "port": init_info["master_port"],
            "rank_offset": init_info["rank_offset"],
            "world_size": init_info["world_size"],
            "timeout_s": _SHARE * timeout_s,
            **{ours: init_info[theirs] for ours, theirs in _PACKING.items() if theirs in init_info},
        }
        await self._on_workers("open_group", group, timeout_s)

    async def close_weight_group(self, timeout_s: float) -> None:
        await self._on_workers("close_group", {}, timeout_s)

    async def start_weight_update(self, timeout_s: float) -> None:
        await self._label("", timeout_s)

    async def update_weights(self, update_info: Json, timeout_s: float) -> None:
        await self._on_workers("receive", self._receive(update_info, timeout_s), timeout_s)

    async def finish_weight_update(self, label: str, timeout_s: float) -> None:
        await self._label(label, timeout_s)

    async def abandon_weight_update(self, timeout_s: float) -> None:
        await self.drop_receipt(timeout_s)

    async def prepare_updates(
        self, tensors: Sequence[TensorMeta], config: str, tied: Sequence[Sequence[str]], timeout_s: float
    ) -> Preparation:
        """As of any engine. It finds out whether our plugin runs in the workers, and can update their model."""
        self._has_tee = True
        try:
            found = await super().prepare_updates(tensors, config, tied, timeout_s)
        except EngineRefused:  # SGLang without the plugin knows no such action
            found = Preparation()
        self._has_tee = found.has_tee and not found.obstacle
        return replace(found, has_tee=self._has_tee)

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        if mode is PauseMode.WAIT:
            await self._drained(timeout_s)
        # "in_place" keeps the KV of frozen requests; "retract" frees it and recomputes it on resume.
        kept = "retract" if mode is PauseMode.KEEP and clear_cache else "in_place"
        body = {"mode": "abort" if mode is PauseMode.ABORT else kept}
        await self._call("POST", "/pause_generation", body, timeout_s)
        if clear_cache:
            await self.reset_prefix_cache(timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._call("POST", "/continue_generation", {}, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> bool:
        try:
            await self.read("POST", "/flush_cache", None, timeout_s)
        except EngineRefused:
            return False
        return True

    async def load_lora_adapter(self, name: str, path: str, timeout_s: float) -> None:
        await self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s)

    async def unload_lora_adapter(self, name: str, timeout_s: float) -> None:
        # SGLang answers an unknown name with a generic 400.
        if name in await self.lora_adapters(timeout_s):
            await self._call("POST", "/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def _check_token_ids(self, body: Json, timeout_s: float) -> None:
        """Refuse ids outside the vocabulary: SGLang does not check, and its server dies."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return
        if self._vocab_size is None:
            self._vocab_size = await self._ask_vocab_size(timeout_s)
        for token_id in (min(prompt), max(prompt)):
            if token_id < 0 or (self._vocab_size and token_id >= self._vocab_size):
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self._vocab_size} tokens", param="prompt"
                )

    async def _ask_vocab_size(self, timeout_s: float) -> int:
        """Return the size of the vocabulary, 0 if unknown: only SGLang's refusal of a bias on an unknown token shows
        it."""
        sampling = {"max_new_tokens": 1, "logit_bias": {str(_NO_TOKEN): 0.0}}
        try:
            await self._call("POST", "/generate", {"input_ids": [0], "sampling_params": sampling}, timeout_s)
        except EngineRefused as error:
            found = re.search(r"keys in \[0, ([0-9]{1,18})\]", str(error))
            return int(found[1]) + 1 if found else 0
        return 0

    async def _models(self, timeout_s: float) -> Json:
        """Return the model list with the start name, not the folder loaded last."""
        listed = await self._call("GET", "/v1/models", None, timeout_s)
        return self._translated(partial(_renamed, name=await self._name(timeout_s)), listed)

    async def _name(self, timeout_s: float) -> str:
        """Return the name of the model that the server was started with."""
        async with self._naming:  # SGLang tells one after the other, each after a step of its scheduler
            if not self._served_name:
                info = await self._call("GET", "/server_info", None, timeout_s)
                self._served_name = self._translated(lambda told: str(told["served_model_name"]), info)
        return self._served_name

    async def _load_by_itself(self, path: str, timeout_s: float) -> None:
        # No flush and no abort: prefixes are salted by weight version, and no request runs. The format is named, as
        # that of a server started with dummy weights loads nothing.
        body = {"model_path": path, "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
        await self._call("POST", _LOAD_ROUTE, body, timeout_s)

    async def _on_workers(self, method: str, arguments: Json, timeout_s: float) -> list[Any]:
        answer = await self._call("POST", _WORKERS, {"action": call_text(method, arguments)}, timeout_s)
        return self._translated(lambda told: list(orjson.loads(told["message"])), answer)

    async def _set_label(self, label: str, timeout_s: float) -> None:
        # SGLang's default here aborts all requests.
        body = {"new_version": label, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body, timeout_s)

    async def _drained(self, timeout_s: float) -> None:
        """Return when no request runs or waits in the engine."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if not self._translated(_num_requests, await self._call("GET", "/v1/loads", None, timeout_s)):
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {self.replica_id}: requests still run after {timeout_s:g} s") from error

    def _receive(self, update_info: Json, timeout_s: float) -> Json:
        info = {key: update_info[key] for key in ("names", "dtype_names", "shapes")}
        return {"update_info": info, "timeout_s": _SHARE * timeout_s}

    @contextlib.contextmanager
    def _in_vllms_words(self) -> Iterator[None]:
        """Translate refusals, ours and SGLang's, into vLLM's form."""
        try:
            yield
        except InvalidRequest as error:
            raise self._refusal(str(error), error.param) from error
        except EngineRefused as error:
            error.body = error_body(message_of(error.body) or str(error), error.status, None)
            raise

    def _refusal(self, message: str, param: str | None) -> EngineRefused:
        return EngineRefused(message, status=400, body=error_body(message, 400, param), replica_id=self.replica_id)


def _vllms_routes(openapi: Json) -> Json:
    served = openapi["paths"]
    return {"paths": {route: {} for route, needed in _ROUTES.items() if needed in served}}


def _renamed(listed: Json, name: str) -> Json:
    """Return a model list with `name` for the model, the first, and for the parent of adapters."""
    model, *adapters = listed["data"]
    return {**listed, "data": [{**model, "id": name, "root": name}, *({**one, "parent": name} for one in adapters)]}


def _num_requests(answer: Json) -> int:
    """Return the requests that run or wait."""
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])


# Of routes whose answers differ from vLLM's.
_ANSWERS: Mapping[str, Callable[[Json], Json]] = {
    "/openapi.json": _vllms_routes,
    "/server_info": server_info,
    "/version": lambda info: {"version": info["version"]},
    "/get_world_size": lambda info: {"world_size": world_size(info)},
    "/detokenize": lambda told: {"prompt": told["text"]},
}
