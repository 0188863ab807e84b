"""The memory that verl's trainer keeps on each GPU while an engine on the same GPU generates."""

from tuning.doctor.known_keys import ACTOR
from tuning.doctor.model_size import BYTES_PER_PARAMETER, weight_gib
from tuning.doctor.values import Values

# Bytes a parameter, sharded over all GPUs. FSDP holds float32 weights and Adam's two moments; gradients are dropped
# after each update. Megatron holds bfloat16 weights, and float32 weights and moments in its distributed optimizer.
_FSDP_WEIGHTS, _FSDP_OPTIMIZER = 4, 8
_MEGATRON_WEIGHTS, _MEGATRON_OPTIMIZER = 2, 12


def is_megatron(values: Values) -> bool:
    return values.text(ACTOR + "strategy") == "megatron"


def is_fsdp(values: Values) -> bool:
    return values.text(ACTOR + "strategy").startswith("fsdp")


def section_of(values: Values) -> str:
    """The section of what trains the actor."""
    return ACTOR + ("fsdp_config" if is_fsdp(values) else values.text(ACTOR + "strategy"))


def is_offloaded(values: Values, name: str) -> bool:
    """True if the actor's `param` or `optimizer` goes to the host while the engine runs."""
    return values.is_true(f"{section_of(values)}.{name}_offload")


def gpus_of(values: Values, section: str = "trainer.") -> int | None:
    """GPUs of all nodes of a section; None where their number is not known."""
    nodes, gpus = values.whole(section + "nnodes"), values.whole(section + "n_gpus_per_node")
    return nodes * gpus if nodes and gpus else None


def resident_gib(values: Values) -> float | None:
    """GiB on each GPU that stay: the actor's weights and optimizer where they are not offloaded. It is the least there
    can be: a critic and what is not sharded come on top, and FSDP's reference is on the host. None for a model or a
    number of GPUs that is not known, and for LoRA."""
    weights = weight_gib(values.text("actor_rollout_ref.model.path"))  # a trainer's checkpoint has two bytes a weight
    gpus = gpus_of(values)
    if weights is None or not gpus or values.number("actor_rollout_ref.model.lora_rank"):
        return None
    each = weights / BYTES_PER_PARAMETER / gpus
    own = (_MEGATRON_WEIGHTS, _MEGATRON_OPTIMIZER) if is_megatron(values) else (_FSDP_WEIGHTS, _FSDP_OPTIMIZER)
    if values.text(ACTOR + "fsdp_config.model_dtype") in ("bf16", "bfloat16", "fp16", "float16"):
        own = (_FSDP_WEIGHTS // 2, _FSDP_OPTIMIZER // 2)
    held = 0.0 if is_offloaded(values, "param") else own[0] * each
    return held + (0.0 if is_offloaded(values, "optimizer") else own[1] * each)
