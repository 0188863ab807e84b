"""The relay process: it receives a trainer's weights instead of the replicas, and writes them into the store.

The trainer's group has two members, the trainer and the relay, so a replica's death cannot break it. Neither can the
gateway's between two updates: the process goes on, and the next gateway finds it. It runs `engines/transfer/relay.py`;
`updates/relay.py` loads the version that it wrote on the replicas.
"""

import asyncio
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
    WeightUpdateFailed,
)
from engines.process.port import HeldPort
from engines.process.process import Command, LastingProcess
from engines.store.weight_store import RELAY
from engines.types import ReplicaInfo
from gateway.config.schema import WeightsConfig
from gateway.weights.snapshots import Snapshots

TRANSPORT = "relay"
WORLD_SIZE = 1
"""Members of the trainer's group beside the trainer."""

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 5.0


class Relay:
    """One receiver process, started when a trainer opens a group and ended by the first call that fails.

    Methods are bounded by the configuration. They raise `InvalidRequest` where the trainer's call is wrong, else
    `WeightUpdateFailed` or `DeadlineExceeded`.
    """

    def __init__(self, config: WeightsConfig, snapshots: Snapshots, log_dir: Path) -> None:
        self._config = config
        self._snapshots = snapshots
        self._log_dir = log_dir
        self._port: HeldPort | None = None
        self._process: LastingProcess | None = None
        self._client: VllmEngine | None = None
        self.is_open = False
        """True while the relay is a member of a trainer's group."""

    @property
    def backend(self) -> str:
        """The trainer's transport, by vLLM's name for it."""
        return "nccl" if self._config.relay_device else "gloo"

    def report(self) -> Json:
        """Return the relay's part of `status`; `pid` is null while no relay runs."""
        process = self._process
        running = process is not None and process.exit_code is None
        return {
            "in_group": self.is_open,
            "backend": self.backend,
            "pid": process.pid if process and running else None,
            "log_path": str(process.log_path) if process else None,
        }

    async def find(self, *, in_group: bool) -> None:
        """Take over the relay of a gateway that has died, if it is in a trainer's group, else end it."""
        if not (record := await self._snapshots.record(RELAY)):
            return
        process = LastingProcess(Command(record["argv"]), Path(record["log_path"]), record["pid"])
        if process.exit_code is not None:
            return
        self._process, self._client = process, VllmEngine("", f"http://127.0.0.1:{record['port']}", has_tee=True)
        try:
            await self._client.health(_PROBE_TIMEOUT_S)
        except (EngineError, DeadlineExceeded):
            in_group = False
        self.is_open = in_group
        if not in_group:
            await self.close()

    async def open(self, init_info: Json) -> None:
        """Join a trainer's group and leave any earlier one."""
        self.is_open = False
        async with self._or_ended("join the trainer's group", self._config.init_timeout_s):
            client = self._client if self._runs else await self._start()
            assert client is not None
            await client.open_weight_group(init_info, self._config.init_timeout_s)
        self.is_open = True

    async def begin(self, draft: Path, served: ReplicaInfo) -> None:
        """Write the tensors of the next calls into this folder of the weight store."""
        # The trainer waits for a slow disk: a tensor that is not written would reach no replica.
        wait_s = self._config.transfer_timeout_s
        copy = ReceiptCopy(draft=str(draft), model=served.model, base="", names=(), wait_s=wait_s)
        timeout_s = self._config.control_timeout_s
        async with self._or_ended("begin an update", self._config.control_timeout_s):
            await self._member().prepare_updates(served.tensors or (), served.model_config, served.tied, timeout_s)
            await self._member().open_receipt(copy, timeout_s)

    async def announced_as(self, update_info: Json) -> Json:
        """Return the announcement under the checkpoint's names."""
        async with self._or_ended("read the announcement", self._config.control_timeout_s):
            return await self._member().announced_as(update_info, self._config.control_timeout_s)

    async def receive(self, update_info: Json) -> None:
        """Receive the announced tensors. Without `begin` they are discarded: a refused trainer does not block."""
        async with self._or_ended("receive the tensors", self._config.transfer_timeout_s):
            await self._member().update_weights(update_info, self._config.transfer_timeout_s)

    async def end(self) -> None:
        """Finish the draft. Return when it is whole; raise where it cannot be finished."""
        async with self._or_ended("write the version down", self._config.load_timeout_s):
            await self._member().close_receipt(self._config.load_timeout_s)

    async def drop(self) -> None:
        """Stop writing: the draft is to be removed."""
        async with self._or_ended("drop an update", self._config.control_timeout_s):
            await self._member().drop_receipt(self._config.control_timeout_s)

    async def close(self) -> None:
        """End the process, which ends the trainer's wait for it."""
        self.is_open = False
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self._process is not None:
            await self._process.stop()
        if self._port is not None:
            self._port.release()

    @property
    def _runs(self) -> bool:
        return self._client is not None and self._process is not None and self._process.exit_code is None

    def _member(self) -> VllmEngine:
        """Return the client of the running relay. Raise `EngineError` where it is in no group."""
        if self._client is None or not self.is_open or not self._runs:
            raise EngineError("it has ended")
        return self._client

    async def _start(self) -> VllmEngine:
        """Start a new process, and return its client when it listens."""
        await self.close()
        self._port = HeldPort()
        port, device = self._port.number, self._config.relay_device
        # The relay sees only its own GPU; Ray hides all GPUs from an actor that has none.
        env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": device.removeprefix("cuda:") if device else ""}
        argv = [
            sys.executable,
            "-m",
            "engines.transfer.relay",
            "--port",
            str(port),
            "--store",
            str(self._snapshots.folder),
            "--device",
            "cuda:0" if device else "cpu",
        ]
        log_path = self._log_dir / f"relay-{time.strftime('%Y%m%d-%H%M%S')}-{port}.log"
        self._process = process = LastingProcess(Command(argv, env), log_path)
        self._client = client = VllmEngine("", f"http://127.0.0.1:{port}", has_tee=True)
        record = {"pid": 0, "port": port, "argv": argv, "log_path": str(log_path)}
        await self._snapshots.note(RELAY, record)  # first: the process ends where the record is another's
        process.start()
        await self._snapshots.note(RELAY, record | {"pid": process.pid})
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
    async def _or_ended(self, purpose: str, timeout_s: float) -> AsyncIterator[None]:
        """End the process where a call fails or is cancelled: relay and trainer may be stuck in the call."""
        try:
            yield
        except InvalidRequest:  # an announcement that the relay has read and refused: it serves on
            raise
        except EngineRefused as error:
            await self.close()
            raise InvalidRequest(message_of(error.body) or str(error), param=_param_of(error.body)) from error
        except EngineError as error:
            await self.close()
            raise WeightUpdateFailed(f"the relay did not {purpose}: {error}{self._remedy}") from error
        except (DeadlineExceeded, TimeoutError) as error:
            await self.close()
            raise DeadlineExceeded(f"the relay did not {purpose} within {timeout_s:g} s{self._remedy}") from error
        except BaseException:
            await self.close()
            raise

    @property
    def _remedy(self) -> str:
        where = f" (its log is {self._process.log_path})" if self._process else ""
        return f"{where}; the trainer's group is over: call /init_weight_transfer_engine to form a new one"


def _param_of(body: Json) -> str | None:
    error = body.get("error")
    param = error.get("param") if isinstance(error, dict) else None
    return f"init_info.{param}" if isinstance(param, str) else None
