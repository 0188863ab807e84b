"""The digit-sorting task out of a pool: TRL's `rollout_func`, and the reward of problems that the pool has chosen.

TRL hands over the prompts of its own batch; here the first groups to end take their place, so rewards are told by the
column `problem` which problem a completion answers.
"""

from collections.abc import Callable
from itertools import cycle
from statistics import fmean
from typing import Any

from examples.tiny_model import task
from trainer_client import BlockingRolloutClient, BlockingRolloutPool, SamplingParams


class SortPool:
    """`size` groups in work, of `samples` samples each, over the problems in their order, again and again."""

    def __init__(self, url: str, tokenizer: Any, problems: list[str], *, samples: int, size: int) -> None:
        self._problems = problems
        prompts = [task.prompt_token_ids(tokenizer, problem) for problem in problems]
        sampling = SamplingParams(n=samples, max_tokens=task.MAX_ANSWER_TOKENS)
        self._pool = BlockingRolloutPool(
            BlockingRolloutClient(url), cycle(prompts), sampling, size=size, max_staleness=2
        )

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return as many completions as TRL asks for, whole groups one after the other."""
        taken = self._pool.batch(len(prompts) // trainer.num_generations)
        rows = [(rollout, completion) for rollout in taken for completion in rollout.completions]
        return {
            "prompt_ids": [
                rollout.prompt_token_ids.tolist() for rollout, _ in rows if rollout.prompt_token_ids is not None
            ],
            "completion_ids": [completion.token_ids.tolist() for _, completion in rows],
            "logprobs": [completion.logprobs.tolist() for _, completion in rows if completion.logprobs is not None],
            "is_resumed": [len(completion.spans) > 1 for _, completion in rows],
            "problem": [self._problems[rollout.prompt_index % len(self._problems)] for rollout, _ in rows],
        }


def exact_answer(
    completions: list[Any],
    problem: list[str],
    is_resumed: list[bool],
    log_metric: Callable[[str, float], None],
    **_: Any,
) -> list[float]:
    """Return TRL's rewards, by the problems that were answered."""
    log_metric("resumed", fmean(is_resumed))
    return task.exact_answer([task.prompt(one) for one in problem], completions)
