"""The other end of a weight update: random weights, the way they go to an engine, and what they score."""

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from engines.config import EngineConfig
from engines.errors import EngineError
from engines.process.launch import gpus_per_replica
from engines.process.port import free_port
from engines.types import EngineKind, PauseMode
from engines.weight_label import committed_label
from sim.model import CHECKPOINT_VERSION, SimModel, read, weights_key
from tests.engines.conformance.lacks import lack_of, not_run
from tests.engines.conformance.subject import REQUEST_S, Json, Subject

TIMEOUT_S = 120.0
"""Longest rendezvous and longest transfer."""
SEQUENCE = [5 + number * number % 10 for number in range(24)]
"""What is scored to tell weights apart."""

_LOOPBACK = "127.0.0.1"
_LET_GO_S = 10.0


class Weights(ABC):
    """Weights that can be made from a seed."""

    @abstractmethod
    def announced(self) -> Json:
        """Names, dtypes and shapes, as /update_weights has them."""

    @abstractmethod
    def make(self, seed: int) -> None: ...

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The tensors made last."""

    @abstractmethod
    def logprobs_of(self, token_ids: list[int], seed: int, version: int) -> list[float]:
        """Make tensors, and return the log-probs that they give all tokens but the first."""

    @abstractmethod
    def logprobs_at_start(self, token_ids: list[int]) -> list[float]:
        """The log-probs that the engine's checkpoint gives all tokens but the first."""


class ModelWeights(Weights):
    """A model of transformers with the engine's configuration, on `device`."""

    def __init__(self, config: EngineConfig, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._torch = torch
        self._device = torch.device(device)
        model_config = AutoConfig.from_pretrained(config.model)
        self._folder = config.model
        self._dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        with self._device:
            self._model = AutoModelForCausalLM.from_config(model_config, dtype=self._dtype).eval()
        self._std = model_config.initializer_range

    def announced(self) -> Json:
        named = list(self._model.named_parameters())
        return {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
        }

    def make(self, seed: int) -> None:
        generator = self._torch.Generator(self._device).manual_seed(seed)
        with self._torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.ndim > 1:  # norms stay one, and biases nought
                    parameter.normal_(0, self._std, generator=generator)
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)  # senders read on streams of their own

    def tensors(self) -> Iterator[tuple[str, Any]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def logprobs_of(self, token_ids: list[int], seed: int, version: int) -> list[float]:
        self.make(seed)
        return self._scored(self._model, token_ids)

    def logprobs_at_start(self, token_ids: list[int]) -> list[float]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=self._dtype)
        return self._scored(model.to(self._device).eval(), token_ids)

    def _scored(self, model: Any, token_ids: list[int]) -> list[float]:
        ids = self._torch.tensor([token_ids], device=self._device)
        with self._torch.no_grad():
            scores = model(ids).logits[0].float().log_softmax(-1)
        return [float(scores[place, token_id]) for place, token_id in enumerate(token_ids[1:])]


class SimWeights(Weights):
    """The simulated model's weights are their version."""

    def __init__(self, subject: Subject) -> None:
        self._model = SimModel.of(subject.config.sim)
        self._tensors = subject.info.tensors or ()

    def announced(self) -> Json:
        return {
            "names": [tensor.name for tensor in self._tensors],
            "dtype_names": [tensor.dtype for tensor in self._tensors],
            "shapes": [list(tensor.shape) for tensor in self._tensors],
        }

    def make(self, seed: int) -> None:
        pass

    def tensors(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def logprobs_of(self, token_ids: list[int], seed: int, version: int) -> list[float]:
        return self._scored(token_ids, weights_key(str(version)))

    def logprobs_at_start(self, token_ids: list[int]) -> list[float]:
        return self._scored(token_ids, weights_key(CHECKPOINT_VERSION))

    def _scored(self, token_ids: list[int], weights: int) -> list[float]:
        contexts = [read(token_ids[:end]) for end in range(1, len(token_ids))]
        return [
            self._model.logprob(context, token_id, weights)
            for context, token_id in zip(contexts, token_ids[1:], strict=True)
        ]


class Channel(ABC):
    """One way in which tensors go to an engine. `join` and `send` block until the engine takes part.

    `lets_go` where a sender is freed when its receiver gives an update up.
    """

    lets_go = False

    def __init__(self, world_size: int) -> None:
        self.port = free_port()
        self.world_size = world_size

    def init_info(self) -> Json:
        where = {"master_address": _LOOPBACK, "master_port": self.port}
        return where | {"rank_offset": 1, "world_size": self.world_size, "packed": True}

    @abstractmethod
    def join(self) -> None: ...

    @abstractmethod
    def send(self, tensors: Iterator[tuple[str, Any]]) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


class NoChannel(Channel):
    """The simulated engine is told of tensors and is sent none."""

    lets_go = True

    def join(self) -> None:
        pass

    def send(self, tensors: Iterator[tuple[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class PackedGloo(Channel):
    """Our own transport, for vLLM without CUDA."""

    lets_go = True

    def join(self) -> None:
        from engines.transfer.gloo import WeightGroup

        self._group = WeightGroup(_LOOPBACK, self.port, 0, self.world_size, TIMEOUT_S)
        self._group.join()

    def send(self, tensors: Iterator[tuple[str, Any]]) -> None:
        self._group.send(tensors)

    def close(self) -> None:
        self._group.close()


class PackedNccl(Channel):
    """vLLM's own transport, as TRL drives it."""

    def __init__(self, world_size: int, device: str) -> None:
        super().__init__(world_size)
        self._device = device

    def join(self) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(self._device)
        self._group = trainer_init(self.init_info())

    def send(self, tensors: Iterator[tuple[str, Any]]) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self._device)
        packed_nccl_broadcast_producer(tensors, self._group, 0, lambda named: named[1])
        torch.cuda.synchronize()

    def close(self) -> None:
        # The group's store holds the socket that the engine would keep waiting on.
        self._group.group.store = None
        self._group.group.socket = None


class Trainer:
    """Updates one engine."""

    def __init__(self, subject: Subject, weights: Weights, new_channel: Callable[[], Channel]) -> None:
        self.subject = subject
        self.weights = weights
        self._new_channel = new_channel
        self._channel: Channel | None = None

    @property
    def is_let_go(self) -> bool:
        """True if the trainer survives an update that the engine gives up."""
        return self._channel is not None and self._channel.lets_go

    async def join(self) -> None:
        """Open a group with the engine."""
        channel = self._channel = self._new_channel()
        opening = self.subject.engine.open_weight_group(channel.init_info(), TIMEOUT_S)
        await self._both(_in_thread(channel.join), opening)

    async def leave(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            if lack_of("close_group", self.subject) is None:
                await self.subject.engine.close_weight_group(TIMEOUT_S)
            await asyncio.wait_for(_in_thread(channel.close), TIMEOUT_S)

    async def update(self, *, seed: int, version: int, **announced: Any) -> None:
        """One whole update, while the engine stands still as in the gateway."""
        async with self.subject.paused(PauseMode.KEEP):
            await self.subject.engine.start_weight_update(REQUEST_S)
            await self.send(seed, **announced)
            await self.subject.engine.finish_weight_update(committed_label(version, "0000000a"), REQUEST_S)

    async def send(self, seed: int, **announced: Any) -> None:
        """The tensors alone. `announced` says more of them, or other things than are true."""
        assert self._channel is not None
        self.weights.make(seed)
        receiving = self.subject.engine.update_weights(self.weights.announced() | announced, TIMEOUT_S)
        await self._both(_in_thread(self._channel.send, self.weights.tensors()), receiving)

    async def _both(self, sending: "asyncio.Future[None]", receiving: Awaitable[None]) -> None:
        """Both ends of a collective. The engine's error is the one told: it is why a sender waits in vain."""
        try:
            await receiving
        except EngineError:
            assert self._channel is not None
            self._channel.close()
            await asyncio.wait([sending], timeout=_LET_GO_S)
            raise
        await asyncio.wait_for(sending, TIMEOUT_S)

    def logprobs_of(self, token_ids: list[int], *, seed: int, version: int) -> list[float]:
        return self.weights.logprobs_of(token_ids, seed, version)


async def trainer_of(subject: Subject) -> Trainer:
    """Over the transport that the engine declares, in both directions where it takes two."""
    config, world_size = subject.config, subject.info.world_size + 1
    if subject.kind is EngineKind.SIM:
        return Trainer(subject, SimWeights(subject), lambda: NoChannel(world_size))
    device = _device(config)
    weights = ModelWeights(config, device)
    server_info = await subject.ask("/server_info?config_format=json")
    if server_info["vllm_config"]["weight_transfer_config"]["backend"] == "gloo":
        return Trainer(subject, weights, lambda: PackedGloo(world_size))
    return Trainer(subject, weights, lambda: PackedNccl(world_size, device))


def mean_distance(one: list[float], other: list[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def _device(config: EngineConfig) -> str:
    """Where the trainer's weights are: beside the engine's GPUs."""
    if not (taken := gpus_per_replica(config)):
        return "cpu"
    import torch

    if torch.cuda.device_count() <= taken:
        not_run(f"needs a second GPU: the engine has {taken} and the trainer needs one of its own")
    return f"cuda:{taken}"


def _in_thread(blocking: Callable[..., None], *arguments: Any) -> "asyncio.Future[None]":
    """Runs it in a thread that does not keep the process from ending: NCCL knows no way to give up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        failed: Exception | None = None
        try:
            blocking(*arguments)
        except Exception as error:
            failed = error
        loop.call_soon_threadsafe(settle, failed)

    def settle(failed: Exception | None) -> None:
        if done.done():
            return  # nobody waits any more
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)

    threading.Thread(target=run, daemon=True).start()
    return done
