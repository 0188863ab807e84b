"""The relay as the gateway sees it: a process that receives a trainer's weights in the place of all replicas.

The trainer's group then has two members, itself and the relay, so that no death of a replica can touch it. How the
relay receives is told in `engines/transfer/relay.py`; what becomes of it is decided in `relay_update.py`.
"""

import asyncio
import importlib.metadata
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engines.clients.http import message_of
from engines.clients.vllm_engine import VllmEngine
from engines.engine import Json, ReceiptCopy
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineRefused,
    InvalidRequest,
    WeightUpdateConflict,
    WeightUpdateFailed,
)
from engines.process.engine_server import free_port
from engines.process.process import Command, EngineProcess
from gateway.config.schema import WeightsConfig

TRANSPORT = "relay"
WORLD_SIZE = 1
"""Members of the trainer's group beside the trainer."""

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 5.0
_STOP_GRACE_S = 0.5  # what it is in the middle of is worth nothing, and the trainer waits to be let go


class Relay:
    """One receiver process, started when a trainer opens a group and ended with the first call that fails.

    Methods are bounded by the configuration. They raise `InvalidRequest` where the trainer's call makes no sense, else
    `WeightUpdateFailed` or `DeadlineExceeded`.
    """

    def __init__(self, config: WeightsConfig, log_dir: str) -> None:
        self._config = config
        self._log_dir = Path(log_dir)
        self._process: EngineProcess | None = None
        self._client: VllmEngine | None = None
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether it was in a trainer's group when last heard of."""
        return self._is_open

    @property
    def backend(self) -> str:
        """What a trainer sends over, in the word of vLLM's weight transfer."""
        return "nccl" if self._config.relay_device else "gloo"

    def report(self) -> Json:
        """As `status` shows it; `pid` is null while no relay runs."""
        process = self._process
        running = process is not None and process.exit_code is None
        return {
            "in_group": self._is_open,
            "backend": self.backend,
            "pid": process.pid if process and running else None,
            "log_path": str(process.log_path) if process else None,
        }

    async def open(self, init_info: Json) -> None:
        """Join a trainer's group, in the place of any before."""
        self._is_open = False
        async with self._or_ended("join the trainer's group", self._config.init_timeout_s):
            client = self._client if self._runs else await self._start()
            assert client is not None
            await client.open_weight_group(init_info, self._config.init_timeout_s)
        self._is_open = True

    async def begin(self, draft: Path, model: str) -> None:
        """Write what is received from now on into this folder of the weight store."""
        # The trainer waits for a slow disk: what is not written would reach no replica.
        wait_s = self._config.transfer_timeout_s
        copy = ReceiptCopy(draft=str(draft), model=model, base="", names=(), wait_s=wait_s)
        async with self._or_ended("begin an update", self._config.control_timeout_s):
            await self._member().open_receipt(copy, self._config.control_timeout_s)

    async def receive(self, update_info: Json) -> None:
        """Receive the tensors announced. Without `begin` they are thrown away, which lets a refused trainer go on."""
        async with self._or_ended("receive the tensors", self._config.transfer_timeout_s):
            await self._member().update_weights(update_info, self._config.transfer_timeout_s)

    async def end(self) -> None:
        """No more tensors come. Returns when the draft is whole, or says why it will not be."""
        async with self._or_ended("write the version down", self._config.load_timeout_s):
            await self._member().close_receipt(self._config.load_timeout_s)

    async def drop(self) -> None:
        """Write no more: the draft is worth nothing."""
        async with self._or_ended("drop an update", self._config.control_timeout_s):
            await self._member().drop_receipt(self._config.control_timeout_s)

    async def close(self) -> None:
        """End the process, which lets a trainer go that waits for it."""
        self._is_open = False
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._process is not None:
            await self._process.stop()

    @property
    def _runs(self) -> bool:
        return self._client is not None and self._process is not None and self._process.exit_code is None

    def _member(self) -> VllmEngine:
        """The client of a relay that is in a trainer's group."""
        if self._client is None or not self._is_open or not self._runs:
            raise EngineError("it has ended")
        return self._client

    async def _start(self) -> VllmEngine:
        """A new process, once it listens."""
        await self.close()
        port, device = free_port(), self._config.relay_device
        # Of the node's GPUs it sees the one that it uses; Ray shows an actor without GPUs none.
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": device.removeprefix("cuda:") if device else ""}
        argv = [
            sys.executable,
            "-m",
            "engines.transfer.relay",
            "--port",
            str(port),
            "--device",
            "cuda:0" if device else "cpu",
        ]
        log_path = self._log_dir / f"relay-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log"
        self._process = process = EngineProcess(Command(argv, env), log_path, _STOP_GRACE_S)
        # Its receiver over NCCL is vLLM's, whose words changed.
        version = _vllm_version() if device else ""
        self._client = client = VllmEngine("", f"http://127.0.0.1:{port}", version, has_tee=True)
        process.start()
        async with asyncio.timeout(self._config.init_timeout_s):
            while process.exit_code is None:
                try:
                    await client.health(_PROBE_TIMEOUT_S)
                except (EngineError, DeadlineExceeded):
                    await asyncio.sleep(_POLL_S)
                else:
                    return client
        raise EngineError(f"it ended with {process.exit_code} before it was ready: {process.last_words(lines=1)}")

    @asynccontextmanager
    async def _or_ended(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        """A process of which a call failed, or was called off, may be stuck in it, and the trainer too: it is ended."""
        try:
            yield
        except EngineRefused as error:
            await self.close()
            raise InvalidRequest(message_of(error.body) or str(error), param=_param_of(error.body)) from error
        except EngineError as error:
            await self.close()
            raise WeightUpdateFailed(f"the relay did not {what}: {error}{self._remedy}") from error
        except (DeadlineExceeded, TimeoutError) as error:
            await self.close()
            raise DeadlineExceeded(f"the relay did not {what} within {timeout_s:g} s{self._remedy}") from error
        except BaseException:
            await self.close()
            raise

    @property
    def _remedy(self) -> str:
        where = f" (its log is {self._process.log_path})" if self._process else ""
        return f"{where}; the trainer's group is over: call /init_weight_transfer_engine to form a new one"


def _vllm_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise WeightUpdateConflict(
            "over NCCL the relay receives with vLLM's own receiver, which the gateway's Python lacks: install vLLM "
            "there, or say weights.relay: never"
        ) from error


def _param_of(body: Json) -> str | None:
    error = body.get("error")
    param = error.get("param") if isinstance(error, dict) else None
    return f"init_info.{param}" if isinstance(param, str) else None
