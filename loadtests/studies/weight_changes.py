"""What of a policy's bfloat16 weights changes in a step of reinforcement learning: elements, and blocks they lie in.

    python -m loadtests.studies.weight_changes --learning-rates 1e-6 1e-5 1e-4 --steps 20

GRPO with AdamW over float32 weights, the digit-sorting task and its model, in this process without engines. After each
step the weights are cast to bfloat16, as a sender casts them, and compared with those of the step before.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from examples.tiny_model import task

PROMPTS, SAMPLES = 32, 8
BLOCKS = (4 << 10, 64 << 10)
_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Shares of the whole, from 0 to 1, in one step."""

    learning_rate: float
    step: int
    reward: float
    tensors: float
    elements: float
    blocks: dict[int, float]
    """By their size in bytes."""
    gaps: dict[str, float]
    """Bytes of places and new values over bytes of the weights, by the type that gaps between places are written in."""


def changes(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[str, Any]:
    """Of two versions' tensors, each flat, as integers of their elements' width."""
    places = [np.flatnonzero(old != new) for old, new in zip(before, after, strict=True)]
    num_elements, num_bytes = sum(new.size for new in after), sum(new.nbytes for new in after)
    return {
        "tensors": sum(bool(one.size) for one in places) / len(after),
        "elements": sum(one.size for one in places) / num_elements,
        "blocks": {size: _touched(places, after, size) for size in BLOCKS},
        "gaps": {
            kind: sum(_coded(one, new, kind) for one, new in zip(places, after, strict=True)) / num_bytes
            for kind in ("uint8", "uint16", "uint32")
        },
    }


def _touched(places: Sequence[np.ndarray], tensors: Sequence[np.ndarray], size: int) -> float:
    touched = sum(np.unique(one * new.itemsize // size).size for one, new in zip(places, tensors, strict=True))
    return touched / sum(-(-new.nbytes // size) for new in tensors)


def _coded(places: np.ndarray, tensor: np.ndarray, kind: str) -> int:
    gaps = np.diff(places, prepend=-1) - 1
    limit = np.iinfo(kind).max + 1
    return int((gaps // limit + 1).sum()) * (np.dtype(kind).itemsize + tensor.itemsize)


def trained(learning_rate: float, steps: int) -> Iterator[Step]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    asked = task.problems(1_000)
    before = _sent(model)
    for step in range(steps):
        reward = _step(model, tokenizer, optimizer, list(islice(asked, PROMPTS)))
        after = _sent(model)
        yield Step(learning_rate=learning_rate, step=step, reward=reward, **changes(before, after))
        before = after


def _sent(model: Any) -> list[np.ndarray]:
    import torch

    return [p.detach().to(torch.bfloat16).view(torch.int16).numpy().reshape(-1).copy() for p in model.parameters()]


def _step(model: Any, tokenizer: Any, optimizer: Any, problems: Sequence[str]) -> float:
    """One step of GRPO; returns the mean reward."""
    import torch

    loss, rewards = torch.zeros(()), []
    for problem in problems:
        prompt = torch.tensor([task.prompt_token_ids(tokenizer, problem)] * SAMPLES)
        with torch.no_grad():
            said = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=task.MAX_ANSWER_TOKENS
            )
        answers = said[:, prompt.shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        reward = torch.tensor([float(text == task.answer(problem)) for text in texts])
        rewards.append(reward)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        logits = model(said).logits[:, prompt.shape[1] - 1 : -1]
        ends = (answers == model.config.eos_token_id).int()
        is_said = ends.cumsum(1) == ends  # up to the first end, and with it
        chosen = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        loss = loss - (advantage[:, None] * chosen * is_said).sum() / is_said.sum()
    optimizer.zero_grad()
    (loss / len(problems)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
    optimizer.step()
    return float(torch.stack(rewards).mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weight_changes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    for rate in args.learning_rates:
        for step in trained(rate, args.steps):
            print(json.dumps(asdict(step)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
