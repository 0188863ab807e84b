"""Why nothing fits, and what would make it possible."""

from collections.abc import Iterator
from dataclasses import replace

from tuning.plan.gpu import GPUS
from tuning.plan.layout import layouts, trains
from tuning.plan.question import Question
from tuning.plan.workload import Lengths

_NODES = (2, 4, 8, 16, 32, 64)
_RANK = 32
_SHORTEST = 256


def why_none(question: Question) -> str:
    """Return the part that does not fit, and each single change, else each change on colocated GPUs, that fits."""
    shape, gpu, gpus = question.shape, question.gpu, question.all_gpus
    machine = f"{gpus} x {gpu.name} ({gpu.memory_gib:g} GiB each)"
    if not trains(question):
        trained = "adapters" if question.lora_rank else "all"
        reason = f"training {trained} of {shape.parameters / 1e9:.1f} billion parameters fits no split of {machine}"
    else:
        needed = f"{shape.weight_bytes / 2**30:.0f} GiB of weights and the KV cache of {question.work.longest} tokens"
        left = "" if question.is_colocated or question.trainer_gpus == 0 or gpus == 1 else "what the trainer leaves of "
        reason = f"{needed} fit no engine on {left}{machine}"
    found = remedies(question)
    offer = f"possible with {'; or '.join(found)}" if found else "no single change that is known here makes it possible"
    return f"--gpus {question.gpus}: {reason}, even with offload, sequence parallelism and chunked logits; {offer}"


def remedies(question: Question) -> list[str]:
    """Options that make the question possible, the cheapest first."""
    single = [text for text, changed in _changes(question) if _is_possible(changed)]
    if single or question.is_colocated or question.trainer_gpus == 0:
        return single
    colocated = _colocated(question)
    return [f"--colocated {text}" for text, changed in _changes(colocated) if _is_possible(changed)]


def _changes(question: Question) -> Iterator[tuple[str, Question]]:
    has_trainer = question.trainer_gpus != 0
    if has_trainer and not question.is_colocated:
        yield "--colocated", _colocated(question)
    if has_trainer and not question.lora_rank:
        yield f"--lora {_RANK}", replace(question, lora_rank=_RANK)
    yield from _first_possible(
        (f"--nodes {nodes}", replace(question, nodes=nodes)) for nodes in _NODES if nodes > question.nodes
    )
    larger = sorted(
        (gpu for gpu in GPUS.values() if gpu.memory_gib > question.gpu.memory_gib), key=lambda gpu: gpu.memory_gib
    )
    yield from _first_possible((f"--gpu {gpu.name}", replace(question, gpu=gpu)) for gpu in larger)
    yield from _first_possible(_shorter(question))
    if has_trainer:
        yield "--trainer-gpus 0 (the engines alone)", replace(question, trainer_gpus=0, is_colocated=False)


def _colocated(question: Question) -> Question:
    return replace(question, is_colocated=True, trainer_gpus=None, overlaps=False)


def _first_possible(changes: Iterator[tuple[str, Question]]) -> Iterator[tuple[str, Question]]:
    for text, changed in changes:
        if _is_possible(changed):
            yield text, changed
            return


def _shorter(question: Question) -> Iterator[tuple[str, Question]]:
    """The question with its longest completions halved, again and again."""
    response, longest = question.work.response, question.work.response.longest // 2
    while longest >= _SHORTEST:
        lengths = Lengths(min(response.mean, longest), longest)
        text = f"--response {lengths.mean:g}:{lengths.longest}"
        yield text, replace(question, work=replace(question.work, response=lengths))
        longest //= 2


def _is_possible(question: Question) -> bool:
    return next(layouts(question), None) is not None
