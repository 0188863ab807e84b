"""The runs of docs/examples.md: what `rollout-gateway plan` expects of each size, and the commands that start it."""

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.docs.parts.table import table
from tuning.plan.choices import Choice, ranked
from tuning.plan.gpu import gpu_of
from tuning.plan.options import step_of
from tuning.plan.question import Question
from tuning.plan.shape import shape_of
from tuning.plan.speed import fitted

BEGIN, END = "<!-- runs: made by python -m scripts.docs -->\n", "<!-- end of runs -->\n"

PROMPTS, SAMPLES, PROMPT, RESPONSE = 128, 8, "256:1024", "1024:3072"
GPU = "H100"
_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
# The config.json of each model.
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": dict(zip(_KEYS, (24, 896, 14, 2, 4864, 151936, True), strict=True)),
    "Qwen/Qwen2.5-1.5B-Instruct": dict(zip(_KEYS, (28, 1536, 12, 2, 8960, 151936, True), strict=True)),
    "Qwen/Qwen2.5-3B-Instruct": dict(zip(_KEYS, (36, 2048, 16, 2, 11008, 151936, True), strict=True)),
    "Qwen/Qwen2.5-7B-Instruct": dict(zip(_KEYS, (28, 3584, 28, 4, 18944, 152064, False), strict=True)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A model on `gpus` GPUs of one node: engines on the first half, a trainer on the others; `lora` is a rank."""

    model: str
    gpus: int
    lora: int = 0

    @property
    def half(self) -> int:
        return self.gpus // 2

    @property
    def title(self) -> str:
        size = self.model.split("-")[1]
        return f"{size}{f', LoRA {self.lora}' if self.lora else ''}, {self.gpus} GPUs"


RUNS = (
    Run("Qwen/Qwen2.5-0.5B-Instruct", 2),
    Run("Qwen/Qwen2.5-1.5B-Instruct", 2),
    Run("Qwen/Qwen2.5-7B-Instruct", 2, lora=32),
    Run("Qwen/Qwen2.5-3B-Instruct", 4),
    Run("Qwen/Qwen2.5-7B-Instruct", 4),
    Run("Qwen/Qwen2.5-7B-Instruct", 8),
)


def grpo_runs() -> str:
    """Return the table of memory, and the commands of each run."""
    head = ["run", "an engine's GPU, GiB", "a training GPU, GiB", "expected s a step", "steps a minute"]
    planned = [(run, plan_of(run)) for run in RUNS]
    lines = ["", *table(head, [_row(run, choice) for run, choice in planned]), ""]
    for run, choice in planned:
        lines += [f"### {run.title}", "", "```", *commands(run, choice), "```", ""]
    return "\n".join([*lines, ""])


def plan_of(run: Run) -> Choice:
    """Return the plan of the run's split whose engines have one GPU each, as the commands start them."""
    found = ranked(question_of(run))
    return next(choice for choice in found if choice.layout.gpus_of_replica == 1)


def question_of(run: Run) -> Question:
    """Return what `plan` is asked."""
    return Question(
        shape=shape_of(SHAPES[run.model], run.model),
        gpu=gpu_of(GPU),
        gpus=run.gpus,
        work=step_of(PROMPTS, SAMPLES, PROMPT, RESPONSE),
        speeds=fitted(),
        trainer_gpus=run.half,
        lora_rank=run.lora,
    )


def _row(run: Run, choice: Choice) -> tuple[str, ...]:
    memory, training = choice.memory, choice.layout.training
    assert training is not None
    engine = f"{memory.weights:.1f} of weights, {memory.kv_cache:.1f} of KV cache ({choice.full_sequences} full ones)"
    trainer = f"{training.gib(question_of(run).work, 1):.1f}, {training}"
    return (run.title, engine, trainer, f"{choice.step_s:.0f}", "not measured")


def commands(run: Run, choice: Choice) -> Iterator[str]:
    """Yield the plan, the fleet, and either trainer."""
    assert choice.trl is not None
    served, trained = (",".join(map(str, gpus)) for gpus in (range(run.half), range(run.half, run.gpus)))
    lora = f" --lora {run.lora}" if run.lora else ""
    yield (
        f"rollout-gateway plan -m {run.model} --gpu {GPU} --gpus {run.gpus} --trainer-gpus {run.half} "
        f"--prompt {PROMPT} --response {RESPONSE}{lora}"
    )
    yield (
        f"CUDA_VISIBLE_DEVICES={served} rollout-gateway up -c examples/grpo.yaml engine.model={run.model} "
        f"engine.num_replicas={run.half}"
    )
    trl = [f"--model_name_or_path {run.model}"]
    trl += [f"--per_device_train_batch_size {choice.trl.per_device_train_batch_size}"]
    trl += [f"--gradient_accumulation_steps {choice.trl.steps_per_generation}"]
    trl += [f"--num_processes {run.half} --accelerate_config zero3"] if run.half > 1 else []
    trl += [f"--use_peft --lora_r {run.lora} --lora_alpha {2 * run.lora}"] if run.lora else []
    yield f"CUDA_VISIBLE_DEVICES={trained} trl grpo --config examples/grpo_trl.yaml {' '.join(trl)}     # or"
    verl = [f"actor_rollout_ref.model.path={run.model}", f"trainer.n_gpus_per_node={run.half}"]
    if run.lora:
        keys = (f"lora_rank={run.lora}", f"lora_alpha={2 * run.lora}", "lora.merge=True")
        verl += [f"actor_rollout_ref.model.{key}" for key in keys]
    yield f"CUDA_VISIBLE_DEVICES={trained} examples/grpo_verl.sh {' '.join(verl)}"
