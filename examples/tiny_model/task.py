"""The task of the tiny model: sort the digits of a string. Problems, prompts, reward and the greedy reference; train.py
makes the model, ../train_sort.py is the reinforcement learning."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parent / "digit-sort"
"""The model of the demo and the tests, made by train.py."""
MIN_DIGITS = 3
MAX_DIGITS = 10
MAX_ANSWER_TOKENS = MAX_DIGITS + 4
"""A token per digit and the end; the rest lets a wrong answer be too long."""


def problems(seed: int) -> Iterator[str]:
    """Yield digit strings without end. Lengths cycle from MIN_DIGITS to MAX_DIGITS, so that each run of 8 is equally
    hard."""
    rng = random.Random(seed)
    while True:
        for length in range(MIN_DIGITS, MAX_DIGITS + 1):
            yield "".join(rng.choice("0123456789") for _ in range(length))


def some_problems(count: int, seed: int = 1_000) -> list[str]:
    """Return the first of `problems(seed)`."""
    return list(islice(problems(seed), count))


def answer(problem: str) -> str:
    return "".join(sorted(problem))


def prompt(problem: str) -> list[dict[str, str]]:
    """Return the problem as chat messages with only the digits."""
    return [{"role": "user", "content": problem}]


def prompt_token_ids(tokenizer: Any, problem: str) -> list[int]:
    """Return the prompt through the chat template, ready for the answer."""
    ids: list[int] = tokenizer.apply_chat_template(prompt(problem), add_generation_prompt=True, return_dict=False)
    return ids


def exact_answer(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """Return TRL's rewards: 1.0 if the completion is exactly the answer, else 0.0."""
    pairs = zip(prompts, completions, strict=True)
    return [float(said[-1]["content"] == answer(asked[-1]["content"])) for asked, said in pairs]


def greedy_token_ids(model_dir: str, asked: Sequence[str]) -> list[list[int]]:
    """Return transformers' greedy answers in float32 as token ids per problem, with the end token.

    One problem at a time: padding would change rounding, and engines are compared with this reference.
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
