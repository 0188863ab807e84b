"""Why nothing fits, and what may help."""

from tuning.plan.layout import trains
from tuning.plan.question import Question


def why_none(question: Question) -> str:
    """Return the part that does not fit, and the options that may help."""
    shape, gpu, gpus = question.shape, question.gpu, question.all_gpus
    machine = f"{gpus} x {gpu.name} ({gpu.memory_gib:g} GiB each)"
    if not trains(question):
        trained = "adapters" if question.lora_rank else "all"
        reason = f"training {trained} of {shape.parameters / 1e9:.1f} billion parameters fits no split of {machine}"
    else:
        needed = f"{shape.weight_bytes / 2**30:.0f} GiB of weights and the KV cache of {question.work.longest} tokens"
        left = "" if question.is_colocated or question.trainer_gpus == 0 or gpus == 1 else "what the trainer leaves of "
        reason = f"{needed} fit no engine on {left}{machine}"
    ways = ["more --nodes", "a larger --gpu", "a shorter --response"]
    if question.trainer_gpus != 0:
        ways += ["--lora 32"] if not question.lora_rank else []
        ways += ["--colocated"] if not question.is_colocated else []
        ways += ["--trainer-gpus 0 (the engines alone)"]
    return (
        f"--gpus {question.gpus}: {reason}, even with offload, sequence parallelism and chunked logits; try "
        f"{'; or '.join(ways)}"
    )
