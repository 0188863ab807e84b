"""An external server: its dialect and routes are detected, and only supported routes are called."""

import asyncio
import time

from engines.clients.http import HttpEngine
from engines.clients.sglang_engine import SglangEngine
from engines.clients.vllm_engine import VllmEngine
from engines.config import EngineConfig
from engines.engine import Engine, Json
from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused, EngineStartFailed
from engines.types import Dialect, EngineKind, ReplicaInfo, is_too_old
from engines.weight_label import is_given

_PROBE_TIMEOUT_S = 5.0
_PROBE_INTERVAL_S = 1.0

# Routes of every OpenAI-compatible server, listed or not.
_COMMON_ROUTES = frozenset({"/v1/models", "/v1/completions", "/v1/chat/completions"})
_WEIGHT_ROUTES = frozenset(
    {
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_info",
        "/pause",
    }
)


class _External(HttpEngine):
    """Client of a server that someone else started. `api_key` is the server's bearer key, if it needs one."""

    def __init__(self, info: ReplicaInfo, api_key: str = "") -> None:
        super().__init__(info.replica_id, info.url, api_key, has_tee=info.has_plugin)
        self._info = info

    async def told_label(self, timeout_s: float) -> str:
        """Return the label that the server reports, without holding it to that."""
        return await self._told_label(timeout_s)

    async def health(self, timeout_s: float) -> None:
        """Raise also if the server has another label than was read or given here last: another process, with weights of
        its own, is behind the URL."""
        await self.ask("GET", "/health" if self._info.has("/health") else "/v1/models", None, timeout_s)
        if (held := self._held) is None:
            return
        label = await self._told_label(timeout_s)
        if label != held == self._held:
            raise EngineFailed(
                f"its weights are labelled {label!r}, and were {held!r}: was it restarted?", replica_id=self.replica_id
            )


class ExternalSglangEngine(_External, SglangEngine):
    """Client of an SGLang server."""


class ExternalEngine(_External, VllmEngine):
    """Client of a vLLM server."""

    async def _told_label(self, timeout_s: float) -> str:
        """As the server tells it; "" from one that takes no weights, and may have no route for it."""
        return await VllmEngine._told_label(self, timeout_s) if self._info.takes_weights else ""


def connect(info: ReplicaInfo, api_key: str = "") -> Engine:
    """Return the client of a replica's engine. `api_key` is the bearer key of an external server."""
    if info.kind is EngineKind.EXTERNAL:
        return external_engine(info, api_key)
    client = SglangEngine if info.kind is EngineKind.SGLANG else VllmEngine
    return client(info.replica_id, info.url, has_tee=info.has_tee)


def external_engine(info: ReplicaInfo, api_key: str = "") -> ExternalEngine | ExternalSglangEngine:
    """Return the client of the server that `info` describes."""
    return (ExternalSglangEngine if info.dialect is Dialect.SGLANG else ExternalEngine)(info, api_key)


class ExternalServer:
    """Has the start, check and stop of `EngineServer`, but owns no process."""

    def __init__(self, config: EngineConfig, *, replica_id: str, group: str) -> None:
        self._config = config
        self._replica_id = replica_id
        self._group = group
        self._url = config.url.rstrip("/")
        self._key = config.api_key.get_secret_value() if config.api_key else ""
        self._engine: ExternalEngine | ExternalSglangEngine | None = None
        self._last_label = ""

    async def start(self) -> ReplicaInfo:
        """Wait for the server and find out what it can do. Raises `EngineStartFailed`, which says what is in the way.

        The wait is bounded by `engine.start_timeout_s`; it ends at once if the server refuses to list its models.
        """
        await self.stop()
        self._last_label = ""
        vllm = VllmEngine(self._replica_id, self._url, api_key=self._key)
        sglang = SglangEngine(self._replica_id, self._url, self._key)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                info = await self._describe(vllm, sglang)
        except TimeoutError as error:
            raise EngineStartFailed(
                f"the server at {self._url} did not answer /v1/models within {self._config.start_timeout_s:g} s "
                "(engine.start_timeout_s)",
                replica_id=self._replica_id,
            ) from error
        finally:
            await vllm.close()
            await sglang.close()
        self._engine = external_engine(info, self._key)
        return info

    async def check(self) -> None:
        """Raise if the server does not answer, or its label is no gateway's any more: a process that was restarted
        may be another release, and is described again after a few failures in a row.

        A lower version alone is a gateway's that takes an update back.
        """
        assert self._engine is not None
        await self._engine.health(_PROBE_TIMEOUT_S)
        label = await self._engine.told_label(_PROBE_TIMEOUT_S)
        if is_given(self._last_label) and not is_given(label):
            reason = f"its weights were labelled {self._last_label!r}, and are {label!r} now: was it restarted?"
            raise EngineFailed(reason, replica_id=self._replica_id)
        self._last_label = label

    async def stop(self) -> None:
        """Close connections. The server keeps running: it is not ours."""
        if self._engine is not None:
            await self._engine.close()

    async def _list_models(self, vllm: VllmEngine, sglang: SglangEngine) -> list[Json]:
        """Return the models under their start names, which SGLang forgets when it loads other weights."""
        while True:
            try:
                models = list((await vllm.ask("GET", "/v1/models", None, _PROBE_TIMEOUT_S))["data"])
                is_sglang = bool(models) and models[0].get("owned_by") == "sglang"
                return list((await _answer(sglang, "/v1/models")).get("data", models)) if is_sglang else models
            except EngineRefused as error:
                key = "; is engine.api_key right?" if error.status in (401, 403) else ""
                raise EngineStartFailed(f"{self._url}: {error}{key}") from error
            except (AttributeError, KeyError, TypeError) as error:
                raise EngineStartFailed(
                    f"/v1/models at {self._url} does not list models: is this an OpenAI-compatible server?",
                    replica_id=self._replica_id,
                ) from error
            except (EngineError, DeadlineExceeded):
                await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _describe(self, vllm: VllmEngine, sglang: SglangEngine) -> ReplicaInfo:
        card = self._chosen(await self._list_models(vllm, sglang))
        owner = card.get("owned_by")
        if owner not in list(Dialect):
            raise EngineStartFailed(
                f"the server at {self._url} is neither vLLM nor SGLang (its models are owned by {owner!r}): call it "
                "directly",
                replica_id=self._replica_id,
            )
        dialect = Dialect(owner)
        probe = sglang if dialect is Dialect.SGLANG else vllm
        routes, version, world_size = await _capabilities(probe)
        has_routes = routes >= _WEIGHT_ROUTES and world_size > 0
        takes_weights = has_routes and not is_too_old(dialect, version)
        return ReplicaInfo(
            replica_id=self._replica_id,
            incarnation=f"{self._url}@{time.time_ns()}",
            group=self._group,
            kind=self._config.kind,
            url=self._url,
            model=str(card["id"]),
            world_size=world_size if takes_weights else 0,
            max_model_len=card.get("max_model_len") or self._config.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            engine_version=version or "unknown",
            capabilities=routes,
            dialect=dialect,
            has_plugin=takes_weights and isinstance(probe, SglangEngine) and await _runs_our_plugin(probe),
        )

    def _chosen(self, models: list[Json]) -> Json:
        """Return the model named by `engine.served_model_name` or `engine.model`, else the first."""
        wanted = self._config.served_model_name or self._config.model
        for card in models:
            if wanted in ("", card.get("id")):
                return card
        there = ", ".join(str(card.get("id")) for card in models) or "none"
        raise EngineStartFailed(
            f"the server at {self._url} has no model {wanted!r} (engine.model); it has {there}",
            replica_id=self._replica_id,
        )


async def _runs_our_plugin(probe: SglangEngine) -> bool:
    """Return True if the workers of the server run our plugin."""
    try:
        return (await probe.prepare_updates((), "", (), _PROBE_TIMEOUT_S)).has_tee
    except (EngineError, DeadlineExceeded):
        return False


async def _capabilities(probe: HttpEngine) -> tuple[frozenset[str], str, int]:
    """Return routes, version ("" if unknown) and workers (0 if unknown) of the server."""
    openapi, version, world = await asyncio.gather(
        *(_answer(probe, path) for path in ("/openapi.json", "/version", "/get_world_size"))
    )
    listed, size = openapi.get("paths"), world.get("world_size")
    routes = _COMMON_ROUTES | set(listed if isinstance(listed, dict) else ())
    return routes, str(version.get("version") or ""), size if isinstance(size, int) else 0


async def _answer(probe: HttpEngine, path: str) -> Json:
    """Return the route's answer; {} if it fails or is late."""
    try:
        return await probe.ask("GET", path, None, _PROBE_TIMEOUT_S)
    except (EngineError, DeadlineExceeded):
        return {}
