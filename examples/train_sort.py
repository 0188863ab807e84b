"""Reinforcement learning of the digit-sorting task with TRL's own GRPOTrainer against one URL. Starts no servers.

    python -m examples.train_sort --url http://127.0.0.1:8000 --out DIR

Prints one JSON object per step to standard output (see `StepReport`) and saves the final weights, which the engines
then hold too.
"""

import argparse
import functools
import json
import os
import socket
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from examples.sort_agent import SortAgents, reward
from examples.sort_pool import SortPool, exact_answer
from examples.tiny_model import task

MODEL = Path(__file__).parent / "tiny_model" / "digit-sort"
PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 8
STEPS_PER_ROUND = 4
"""The problems repeat after this many steps, so that rewards of different rounds are comparable."""
LEARNING_RATE = 1e-4
SEED_OF_PROBLEMS = 1_000
"""Added to the seed, so that no run has the problems of the model's training."""


class Stopwatch:
    """Sums the seconds of timed calls until read."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - began

        return timed_call

    def read(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def make_trainer(args: argparse.Namespace) -> Any:
    """Build TRL's trainer as users do; without CUDA its client uses gloo."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer_client import trl as gloo_client

    gloo_client.install(timeout_s=args.timeout)
    asked = list(islice(task.problems(SEED_OF_PROBLEMS + args.seed), STEPS_PER_ROUND * PROMPTS_PER_STEP))
    pooled: dict[str, Any] = {}
    if args.agent:
        pooled["rollout_func"] = SortAgents(args.url).rollouts
    elif args.pool:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        pool = SortPool(args.url, tokenizer, asked, samples=SAMPLES_PER_PROMPT, size=args.pool)
        pooled["rollout_func"] = pool.rollouts
    config = GRPOConfig(
        output_dir=str(args.out),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=task.MAX_ANSWER_TOKENS,
        shuffle_dataset=False,  # Lengths cycle: in order, all steps are equally hard.
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=args.url,
        vllm_group_port=free_port(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(args.model),
        args=config,
        reward_funcs=reward if args.agent else exact_answer if args.pool else task.exact_answer,
        train_dataset=Dataset.from_list([{"prompt": task.prompt(problem)} for problem in asked]),
        **pooled,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def report_steps(trainer: Any, num_steps: int) -> None:
    """Print a JSON line after each step.

    step, steps: this one, and how many there will be. reward: mean of the step. completion_tokens: mean length.
    tokens: completion tokens of the step. generate_s, tokens_per_s: the call to the URL. sync_s: weights to all
    engines. step_s: the whole step. older: share of completions out of a pool by weights before the step's newest.
    importance_ratio: mean over tokens of trainer's to engines' probability. largest_difference: of their log-probs, of
    any token.
    weight_version: the version of the completions, null if the URL does not report it.
    """
    from transformers import TrainerCallback

    client = trainer.vllm_generation.vllm_client
    syncing, generating = Stopwatch(), Stopwatch()
    trainer.vllm_generation.sync_weights = syncing.timed(trainer.vllm_generation.sync_weights)
    if trainer.rollout_func:
        trainer.rollout_func = generating.timed(trainer.rollout_func)
    client.generate = generating.timed(client.generate)

    class StepReport(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" not in logs:
                return
            generate_s = generating.read()
            tokens = round(logs["completions/mean_length"] * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT)
            print_json(
                step=state.global_step,
                steps=num_steps,
                reward=round(logs["reward"], 4),
                completion_tokens=round(logs["completions/mean_length"], 2),
                tokens=tokens,
                generate_s=round(generate_s, 3),
                tokens_per_s=round(tokens / generate_s),
                sync_s=round(syncing.read(), 3),
                step_s=round(logs["step_time"], 3),
                older=round(logs.get("older", 0.0), 4),
                importance_ratio=round(logs["sampling/importance_sampling_ratio/mean"], 6),
                largest_difference=logs["sampling/sampling_logp_difference/max"],
                weight_version=getattr(client, "weight_version", None),
            )

    trainer.add_callback(StepReport())


def print_json(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the digit-sorting model with TRL against a rollout server.")
    parser.add_argument("--url", required=True, help="the rollout server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True, help="folder for the final model")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model that the server started with")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="limit in seconds on each wait of a weight sync")
    parser.add_argument("--pool", type=int, default=0, help="groups in work, of which a step takes the first 32")
    parser.add_argument("--agent", action="store_true", help="an agent with a tool in place of single answers")
    parser.add_argument("--no-sync", action="store_true", help="never send weights: the reward must then stay flat")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    trainer = make_trainer(args)
    if args.no_sync:
        trainer.vllm_generation.sync_weights = lambda: None
    report_steps(trainer, args.steps)
    trainer.train()
    # TRL syncs before it generates, so the engines still lack the last step.
    trainer.vllm_generation.sync_weights()
    trainer.save_model(str(args.out))


if __name__ == "__main__":
    main()
