"""Asynchronous GRPO against one URL without a framework: a rollout client, a weight sender and torch.

    python -m examples.async_grpo --url http://127.0.0.1:8100 --out DIR

While the trainer learns from one batch the engines generate the next, so a completion's weights may be older than the
trainer's: by at most `--staleness` versions, which the gateway enforces. The loss corrects for it with the importance
ratio of each token.

Prints one JSON object per step to standard output (see `_report`) and saves the final weights, which the engines then
hold too.
"""

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import task
from trainer_client import (
    BlockingBatch,
    BlockingRolloutClient,
    Completion,
    Rollout,
    SamplingParams,
    WeightSender,
)

MODEL = Path(__file__).parent / "tiny_model" / "digit-sort"
PROMPTS_PER_STEP = 32
STEPS_PER_ROUND = 4
"""The problems repeat after this many steps, so that rewards of different rounds are comparable."""
SAMPLING = SamplingParams(n=8, max_tokens=task.MAX_ANSWER_TOKENS)
LEARNING_RATE = 1e-4
CLIP = 0.2
MAX_GRADIENT_NORM = 1.0
SEED_OF_PROBLEMS = 1_000
"""As in examples/train_sort.py, like the other constants, so that the two are comparable."""


@dataclass
class Lesson:
    """One batch as tensors of [completions, tokens]: a mask of sampled tokens (`is_drawn`), and their log-probs
    then."""

    token_ids: torch.Tensor
    is_drawn: torch.Tensor
    is_there: torch.Tensor
    drawn_logprobs: torch.Tensor
    is_on_policy: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor


class Trainer:
    """A float32 model that learns from rollouts; `version` is its weights' version behind the URL."""

    def __init__(self, args: argparse.Namespace, client: BlockingRolloutClient, sender: WeightSender) -> None:
        torch.manual_seed(args.seed)
        self.client = client
        self.sender = sender
        self.staleness: int = args.staleness
        self.tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.problems = list(islice(task.problems(SEED_OF_PROBLEMS + args.seed), STEPS_PER_ROUND * PROMPTS_PER_STEP))
        # Engines may hold other weights: start with the trainer's.
        self.version = sender.push(self.model)

    def train(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """Train; yield the report of each step."""
        under_way: deque[BlockingBatch] = deque()
        asked, first_version = 0, self.version
        for step in range(num_steps):
            began = time.perf_counter()
            while asked < min(step + 1 + self.staleness, num_steps):
                under_way.append(
                    self.ask(asked, min_version=max(first_version, first_version + asked - self.staleness))
                )
                asked += 1
            rollouts = under_way.popleft().gather()
            waited = time.perf_counter()
            lesson = self.lesson(step, rollouts)
            ratios = self.learn(lesson)
            learned = time.perf_counter()
            oldest = min(completion.oldest_version or 0 for rollout in rollouts for completion in rollout.completions)
            staleness, self.version = self.version - oldest, self.sender.push(self.model)
            synced = time.perf_counter()
            seconds = {"wait_s": waited - began, "learn_s": learned - waited, "sync_s": synced - learned}
            yield {
                "step": step + 1,
                "steps": num_steps,
                **_report(lesson, ratios),
                "staleness": staleness,
                "weight_version": self.version,
                **{name: round(value, 3) for name, value in seconds.items()},
            }

    def ask(self, step: int, min_version: int) -> BlockingBatch:
        """Start the rollouts of a step, in the background."""
        prompts = [task.prompt_token_ids(self.tokenizer, problem) for problem in self.asked(step)]
        return self.client.generate(prompts, SAMPLING, min_version=min_version, timeout_s=600.0)

    def asked(self, step: int) -> list[str]:
        start = step % STEPS_PER_ROUND * PROMPTS_PER_STEP
        return self.problems[start : start + PROMPTS_PER_STEP]

    def lesson(self, step: int, rollouts: list[Rollout]) -> Lesson:
        """Return the batch: rewards relative to other samples of the same prompt, all padded to one length."""
        problems = self.asked(step)
        drawn = [(rollout, completion) for rollout in rollouts for completion in rollout.completions]
        prompts = [rollout.prompt_token_ids for rollout, _ in drawn if rollout.prompt_token_ids is not None]
        length = max(len(ids) + len(completion.token_ids) for ids, (_, completion) in zip(prompts, drawn, strict=True))
        shape = len(drawn), length
        lesson = Lesson(
            token_ids=torch.zeros(shape, dtype=torch.long),
            is_drawn=torch.zeros(shape, dtype=torch.bool),
            is_there=torch.zeros(shape, dtype=torch.long),
            drawn_logprobs=torch.zeros(shape),
            is_on_policy=torch.zeros(shape, dtype=torch.bool),
            rewards=torch.tensor([float(c.text == task.answer(problems[r.prompt_index])) for r, c in drawn]),
            advantages=torch.zeros(len(drawn)),
        )
        for row, (prompt, (_, completion)) in enumerate(zip(prompts, drawn, strict=True)):
            start = len(prompt)
            end = start + len(completion.token_ids)
            lesson.token_ids[row, :start] = torch.from_numpy(prompt)
            lesson.token_ids[row, start:end] = torch.from_numpy(completion.token_ids)
            lesson.is_there[row, :end] = 1
            lesson.is_drawn[row, start:end] = True
            lesson.drawn_logprobs[row, start:end] = torch.from_numpy(completion.logprobs)
            lesson.is_on_policy[row, start:end] = self.is_on_policy(completion)
        groups = lesson.rewards.view(-1, SAMPLING.n)
        spread = groups.std(dim=1, keepdim=True)
        lesson.advantages = ((groups - groups.mean(dim=1, keepdim=True)) / (spread + 1e-4)).view(-1)
        return lesson

    def is_on_policy(self, completion: Completion) -> bool:
        return {span.version for span in completion.spans} == {self.version}

    def learn(self, lesson: Lesson) -> torch.Tensor:
        """Take one optimizer step. Return each token's probability now divided by that when it was sampled."""
        logits = self.model(lesson.token_ids, attention_mask=lesson.is_there).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, lesson.token_ids[:, 1:, None]).squeeze(-1)
        drawn = lesson.is_drawn[:, 1:]
        ratios = (logprobs - lesson.drawn_logprobs[:, 1:])[drawn].exp()
        advantages = lesson.advantages[:, None].expand_as(logprobs)[drawn]
        gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
        self.optimizer.zero_grad()
        (-gains.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        return ratios.detach()


def _report(lesson: Lesson, ratios: torch.Tensor) -> dict[str, Any]:
    """reward: mean of the step. completion_tokens: mean length. importance_ratio: mean over tokens. clipped: share of
    tokens whose ratio is out of bounds. on_policy: share of tokens that the weights which learn from them have made;
    on_policy_error: the furthest ratio of those from 1, or null where there are none. Beside these the step has
    staleness: versions that the oldest completion was behind; weight_version: what the engines hold after it; wait_s,
    learn_s, sync_s: where its time went."""
    on_policy = lesson.is_on_policy[lesson.is_drawn]
    errors = (ratios[on_policy] - 1).abs()
    return {
        "reward": round(lesson.rewards.mean().item(), 4),
        "completion_tokens": round(lesson.is_drawn.sum().item() / len(lesson.rewards), 2),
        "importance_ratio": round(ratios.mean().item(), 6),
        "clipped": round(((ratios - 1).abs() > CLIP).float().mean().item(), 4),
        "on_policy": round(on_policy.float().mean().item(), 3),
        "on_policy_error": errors.max().item() if len(errors) else None,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the digit-sorting model with an asynchronous GRPO of one's own."
    )
    parser.add_argument("--url", required=True, help="the rollout URL, e.g. http://127.0.0.1:8100")
    parser.add_argument("--out", type=Path, required=True, help="folder for the final model")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model that the engines started with")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--staleness", type=int, default=1, help="largest lag of rollouts in versions; 0 waits for each"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="limit in seconds on each wait of a weight sync")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with BlockingRolloutClient(args.url) as client, WeightSender(client, timeout_s=args.timeout) as sender:
        client.wait_ready(args.timeout)
        trainer = Trainer(args, client, sender)
        for step in trainer.train(args.steps):
            print(json.dumps(step), flush=True)
        trainer.model.save_pretrained(args.out)
        trainer.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
