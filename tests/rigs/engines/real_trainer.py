"""A trainer of real vLLM engines on CPU: TRL's client over gloo, the model that it trains, and its answers."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_client

from engines.process.port import free_port
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, greedy_token_ids, until_receiving
from trainer_client import trl as gloo_trl

TIMEOUT_S = 60.0
PROBLEMS = list(islice(task.problems(seed=9), 8))


@contextmanager
def trl_client(url: str) -> Iterator[gloo_trl.GlooVLLMClient]:
    """TRL's client in a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "packed_nccl_broadcast_producer", gloo_trl.send_packed)
        client = gloo_trl.GlooVLLMClient(url, group_port=free_port(), timeout_s=TIMEOUT_S)
        client.init_communicator("cpu")
        yield client
        client.close_communicator()


def checkpoint() -> Any:
    """The model that engines come with."""
    return AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)


def learn(model: Any, seed: int, by: float = 0.05, share: float = 1.0) -> Any:
    """Move this share of the model's elements, at random places. Return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(torch.randn(parameter.shape, generator=generator) * moved, alpha=by)
    return model


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    return [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS]


def answers(model: Any, folder: Path) -> list[list[int]]:
    """The answers of transformers, from the model as it is saved in `folder`."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(folder)
    return task.greedy_token_ids(str(folder), PROBLEMS)


def said_at(url: str) -> list[list[int]]:
    """The answers of an engine, or of all behind a gateway."""
    return greedy_token_ids(url, prompts(), task.MAX_ANSWER_TOKENS)


def announced(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in named],
        "dtype_names": ["float32"] * len(named),
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


@dataclass
class RealTrainer:
    """A fleet, a trainer in a group with it or with its relay, and the trainer's model."""

    real: RealFleet
    client: gloo_trl.GlooVLLMClient
    model: Any
    folder: Path

    def learn(self, seed: int) -> None:
        """Other weights than any before."""
        learn(self.model, seed)

    def expected(self) -> list[list[int]]:
        return answers(self.model, self.folder)

    def said_by(self, index: int) -> list[list[int]]:
        return said_at(self.real.replicas[index].url)

    def all_say(self, expected: list[list[int]]) -> bool:
        return all(said_at(info.url) == expected for info in self.real.replicas)

    def broken_off(self, end: Callable[[], None]) -> str:
        """Announce all tensors and have the transfer end by `end` before any is sent. Return the error that the trainer
        is told."""
        assert self.real.call("/start_weight_update", {})[0] == 200
        with ThreadPoolExecutor(1) as beside:
            body = {"update_info": announced(list(self.model.named_parameters()))}
            answer = beside.submit(self.real.call, "/update_weights", body)
            until_receiving(self.real)
            end()
            status, reply = answer.result(TIMEOUT_S)
        assert status == 424, reply
        return str(reply["error"]["message"])


@contextmanager
def trained(real: RealFleet, folder: Path) -> Iterator[RealTrainer]:
    with trl_client(real.url) as client:
        yield RealTrainer(real, client, checkpoint(), folder)
