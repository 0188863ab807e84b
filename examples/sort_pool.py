"""The digit-sorting task out of a pool: TRL's `rollout_func`, and the reward of problems that the pool has chosen.

TRL hands over the prompts of its own batch; here the first groups to end take their place, so rewards are told by the
column `problem` which problem a completion answers.
"""

import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import fmean
from typing import Any

from examples.tiny_model import task
from trainer_client import BlockingBatch, BlockingRolloutClient, Rollout, SamplingParams


class SortPool:
    """`size` groups in work, of `samples` samples each, over the problems in their order, again and again. A step takes
    the first to end; the others go on meanwhile, under the weights of later steps."""

    def __init__(self, url: str, tokenizer: Any, problems: list[str], *, samples: int, size: int) -> None:
        self._client = BlockingRolloutClient(url)
        self._sampling = SamplingParams(n=samples, max_tokens=task.MAX_ANSWER_TOKENS)
        self._asked = cycle([(problem, task.prompt_token_ids(tokenizer, problem)) for problem in problems])
        self._size = size
        self._running: list[tuple[str, BlockingBatch]] = []

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return as many completions as TRL asks for, whole groups one after the other."""
        taken = self._first_to_end(len(prompts) // trainer.num_generations)
        rows = [(problem, rollout, completion) for problem, rollout in taken for completion in rollout.completions]
        versions = [completion.oldest_version or 0 for _, _, completion in rows]
        return {
            "prompt_ids": [
                rollout.prompt_token_ids.tolist() for _, rollout, _ in rows if rollout.prompt_token_ids is not None
            ],
            "completion_ids": [completion.token_ids.tolist() for _, _, completion in rows],
            "logprobs": [completion.logprobs.tolist() for _, _, completion in rows if completion.logprobs is not None],
            "is_older": [version < max(versions) for version in versions],
            "problem": [problem for problem, _, _ in rows],
        }

    def _first_to_end(self, count: int) -> list[tuple[str, Rollout]]:
        for problem, prompt in islice(self._asked, self._size - len(self._running)):
            self._running.append((problem, self._client.generate([prompt], self._sampling)))
        while len(ended := [one for one in self._running if one[1].is_done]) < count:
            time.sleep(0.01)
        taken = ended[:count]
        self._running = [one for one in self._running if one not in taken]
        return [(problem, batch.gather()[0]) for problem, batch in taken]


def exact_answer(
    completions: list[Any],
    problem: list[str],
    is_older: list[bool],
    log_metric: Callable[[str, float], None],
    **_: Any,
) -> list[float]:
    """Return TRL's rewards, by the problems that were answered."""
    log_metric("older", fmean(is_older))
    return task.exact_answer([task.prompt(one) for one in problem], completions)
