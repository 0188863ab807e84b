"""The task of the tiny model: sort the digits of a string. Holds problems, prompts, reward and the greedy reference;
making the model is left to train.py, reinforcement learning to ../train_sort.py."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parent / "digit-sort"
"""The model that the demo and the tests serve; train.py has made it."""
MIN_DIGITS = 3
MAX_DIGITS = 10
MAX_ANSWER_TOKENS = MAX_DIGITS + 4
"""A digit is a token and the end is one more; the rest lets a wrong answer show that it is too long."""


def problems(seed: int) -> Iterator[str]:
    """Digit strings without end. Lengths go round from MIN_DIGITS to MAX_DIGITS, so that every run of 8 is as hard."""
    rng = random.Random(seed)
    while True:
        for length in range(MIN_DIGITS, MAX_DIGITS + 1):
            yield "".join(rng.choice("0123456789") for _ in range(length))


def some_problems(count: int, seed: int = 1_000) -> list[str]:
    """The first of `problems(seed)`."""
    return list(islice(problems(seed), count))


def answer(problem: str) -> str:
    return "".join(sorted(problem))


def prompt(problem: str) -> list[dict[str, str]]:
    """The problem as chat messages; nothing but the digits."""
    return [{"role": "user", "content": problem}]


def prompt_token_ids(tokenizer: Any, problem: str) -> list[int]:
    """The prompt as a trainer sends it: through the chat template, ready for the answer."""
    ids: list[int] = tokenizer.apply_chat_template(prompt(problem), add_generation_prompt=True, return_dict=False)
    return ids


def exact_answer(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """TRL reward function: 1.0 where the completion is the answer and nothing else, 0.0 otherwise."""
    pairs = zip(prompts, completions, strict=True)
    return [float(said[-1]["content"] == answer(asked[-1]["content"])) for asked, said in pairs]


def greedy_token_ids(model_dir: str, asked: Sequence[str]) -> list[list[int]]:
    """What transformers answers greedily in float32, one list of token ids a problem, the end token included.

    One problem at a time: padding would change rounding, and this is what engines are compared with.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for problem in asked:
        asked_ids = prompt_token_ids(tokenizer, problem)
        output = model.generate(torch.tensor([asked_ids]), do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
        answers.append(output[0, len(asked_ids) :].tolist())
    return answers
