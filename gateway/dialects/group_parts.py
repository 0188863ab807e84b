"""Parts of a group: the samples of a prompt as several rollouts, which go to the replicas with the most room.

A group of many samples is a large piece, and the lengths of its samples are alike: the replica that has a long group is
the last of a batch. A part costs another reading of the prompt where its replica has not read it yet.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line counts parts too, without the packages of a gateway
    from gateway.dialects.completion_prompt import CompletionPrompt

# The samples of such a request are made of each other, or have log-probs of the prompt that each part would make again.
_OF_THE_WHOLE = ("seed", "best_of", "use_beam_search", "prompt_logprobs", "echo")


def part_size(n: int, most: int | None) -> int:
    """Return the samples of a part, at most `most` of `n`. Parts are equal, so that they number samples as the whole
    does."""
    if most is None or n <= most:
        return n
    return next(size for size in range(most, 0, -1) if n % size == 0)


def in_parts(prompts: "Iterable[CompletionPrompt]", most: int | None) -> "list[CompletionPrompt]":
    """Return the prompts of one request, each as its parts of at most `most` samples."""
    return [part for prompt in prompts for part in _parts_of(prompt, most)]


def _parts_of(prompt: "CompletionPrompt", most: int | None) -> "Iterator[CompletionPrompt]":
    rollout, size = prompt.rollout, part_size(prompt.rollout.n, most)
    if size == rollout.n or rollout.session or not _has_single_samples(prompt):
        yield prompt
        return
    parts, made = rollout.n // size, rollout.tokens - rollout.prompt_tokens
    for place in range(parts):
        index = prompt.index * parts + place
        part = replace(
            rollout,
            request_id=f"{rollout.request_id}-{place}",
            n=size,
            tokens=rollout.prompt_tokens + made // parts,
            attempts=rollout.attempts.branch(),
        )
        yield replace(prompt, index=index, parts=parts, rollout=part, body=prompt.body | {"n": size})


def _has_single_samples(prompt: "CompletionPrompt") -> bool:
    values = (prompt.body.get(field) for field in _OF_THE_WHOLE)
    return all(value is None or value is False for value in values)
