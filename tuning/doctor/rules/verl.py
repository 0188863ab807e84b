"""Rules about verl's trainer and its rollout section."""

import math
import re
from collections.abc import Iterator

from gateway.config.load import Setting
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.finding import Found, consider, hurts
from tuning.doctor.known_keys import ACTOR, ROLLOUT, VERL
from tuning.doctor.rules.rule import (
    VERL_CODE,
    VERL_GUIDE,
    VERL_PRACTICE,
    Rule,
    of_fsdp,
    of_rollout,
    of_stock_verl,
    of_verl,
    of_verl_file,
    row,
)
from tuning.doctor.subject import Subject
from tuning.doctor.trainer_memory import gpus_of, is_fsdp, is_megatron, section_of
from tuning.doctor.values import Values, as_number

REF = "actor_rollout_ref.ref."
MODEL = "actor_rollout_ref.model."
_LONG_CONTEXT = 32_768
# Tokens of a pass on one GPU with which gathering the weights is a small share of the computing.
_FULL_PASS, _FULL_PASS_OVER_NODES = 8_192, 16_384
# Tokens that verl's chunked entropy computes at a time.
_ENTROPY_CHUNK = 2_048
_MEGATRON_SPLITS = ("tensor_model", "pipeline_model", "context")
# Models that liger-kernel has kernels for, but for those with images, which verl patches in the same place.
_LIGER = re.compile(r"(?i)llama|mistral|mixtral|gemma|phi-?[34]|qwen(?!.*(vl|moe|omni|a\d+b))|deepseek-(llm|math)")
# Models that verl's guide names among those that it packs.
_PACKED = re.compile(r"llama|mistral|qwen|deepseek-llm|deepseek-math", re.IGNORECASE)
# Keys of names and places, with which nothing can be wrong that a file shows.
_LABEL = re.compile(r"\b(trainer\.(project_name|experiment_name|default_local_dir)|data\.(train|val)_files)=")
# Their advantage is what a completion earns beside others of its prompt.
_BY_GROUP = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gdpo", "gpg")


@Rule(
    of_verl_file, "verl-keys", "every key", "A key that was renamed sets nothing, or ends the run.",
    "verl's trainer/config/*.yaml, composed by Hydra, of release 0.9.1", 1.0,
)  # fmt: skip
def _unknown_keys(file: VerlFile, subject: Subject) -> Iterator[Found]:
    """Keys that verl lacks. A run from a command ends at one; from a file it is left unread."""
    keys, given = file.keys, {file.full_key(setting.key) for setting in file.given}
    if not keys.is_complete:
        return
    says = f"Hydra ends the run: {VERL} has no such key" if file.overrides else f"{VERL} leaves it unread"
    for setting in file.given:
        if new := keys.renamed(file.full_key(setting.key)):
            instead = f"{file.values.shown(new)} has its value already: leave it out"
            yield hurts(setting, says, instead if new in given else file.values.shown(new))
        elif file.is_stock and file.overrides and not keys.has(setting.key) and keys.is_free(setting.key):
            yield hurts(setting, says, f"+{setting.key}={setting.value}")  # of a free dictionary
    for override in file.overrides:
        if override.plus == "+" and isinstance(keys.defaults.get(override.key), (bool, int, float)):
            message = f"Hydra ends the run: {VERL} has this key already, and takes it without a plus"
            yield hurts(override.setting, message, f"{override.key}={override.setting.value}")
    if not file.is_stock:
        names = ", ".join(setting.key for setting in file.unknown)
        message = f"{VERL} lacks {len(file.unknown)} keys: a fork or another release reads them. They are: {names}"
        yield consider(file.unknown[0], message, "judge it by the software that will run it")
        return
    for setting in file.unknown:
        if near := keys.nearest(file.full_key(setting.key)):
            yield hurts(setting, says, f"did you mean {file.values.shown(near)}?")
        elif file.overrides:
            yield hurts(setting, says, "leave it out")


@Rule(
    of_verl_file, "verl-unread", "the script's commands", "A rule is silent on a value that it does not have.",
    "GNU Bash manual, The Restricted Shell", 0.0,
)  # fmt: skip
def _unread(file: VerlFile, subject: Subject) -> Iterator[Found]:
    for text in file.unread:
        if not _LABEL.search(text):
            yield consider(None, text, "judge it by hand, or give the YAML that --cfg job prints")


@Rule(
    of_verl_file, "verl-lost-overrides", "the script's lines",
    "In a shell a comment or an empty line ends a command that a backslash continued.",
    "POSIX shell, token recognition", 1.0,
)  # fmt: skip
def _lost_overrides(file: VerlFile, subject: Subject) -> Iterator[Found]:
    if lost := [override for override in file.overrides if override.is_lost]:
        message = f"{len(lost)} overrides from here on belong to no command: the one above ended before them, at a "
        message += "comment, an empty line or a line without a backslash at its very end"
        yield hurts(lost[0].setting, message, "no comments or empty lines between continued lines")


def _critic_runs(values: Values) -> bool:
    """verl's need_critic."""
    enabled = values.at("critic.enable").value
    return bool(enabled) if enabled is not None else values.text("algorithm.adv_estimator") == "gae"


def _reference_runs(values: Values) -> bool:
    return values.is_true("algorithm.use_kl_in_reward") or values.is_true(ACTOR + "use_kl_loss")


def _is_dynamic(values: Values) -> bool:
    return values.is_true(ACTOR + "use_dynamic_bsz")


def _is_on_cuda(values: Values) -> bool:
    return values.text("trainer.device") in ("", "cuda")


@Rule(
    of_stock_verl, "verl-batches",
    "data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, trainer.n_gpus_per_node, nnodes",
    "These are global numbers, which verl shares out over all GPUs.",
    f"{VERL_CODE}, utils/config.py and workers/config/actor.py", 1.0,
)  # fmt: skip
def _batches(values: Values, subject: Subject) -> Iterator[Found]:
    batch, setting = values.whole("data.train_batch_size"), values.at("data.train_batch_size")
    mini, group, gpus = values.whole(ACTOR + "ppo_mini_batch_size"), values.whole(ROLLOUT + "n"), gpus_of(values)
    if not batch or not mini or not group or not gpus or _is_dynamic(values):
        return
    if batch < mini:
        yield hurts(setting, f"verl refuses it: smaller than ppo_mini_batch_size {mini}", f"{mini} or more")
    elif not is_megatron(values) and batch * group % gpus:
        message = f"verl refuses it: {batch} x n {group} is not divisible by {gpus} GPUs"
        yield hurts(setting, message, f"{-(-batch // gpus) * gpus}")
    elif batch % mini:
        message = f"no multiple of ppo_mini_batch_size {mini}: the last mini batch is short"
        yield consider(setting, message, "a multiple")


@Rule(
    of_stock_verl, "verl-micro-batches", "*_micro_batch_size, *_micro_batch_size_per_gpu",
    "Micro batches are local: what one GPU computes in one pass.", f"{VERL_GUIDE}; {VERL_CODE}, utils/config.py", 1.0,
)  # fmt: skip
def _micro_batches_given(values: Values, subject: Subject) -> Iterator[Found]:
    names = [ACTOR + "ppo_micro_batch_size", ROLLOUT + "log_prob_micro_batch_size"]
    names += [REF + "log_prob_micro_batch_size"] if _reference_runs(values) else []
    names += ["critic.ppo_micro_batch_size"] if _critic_runs(values) else []
    for name in [] if _is_dynamic(values) else names:
        old, per_gpu = values.at(name), values.at(f"{name}_per_gpu")
        if old.value is not None and old.origin != "default" and per_gpu.value is not None:
            yield hurts(old, f"verl refuses it beside {per_gpu.key}", f"leave {old.key} out")
        elif old.value is not None:
            message = "counted over all GPUs and deprecated: it has to change with their number"
            yield consider(old, message, f"{per_gpu.key}")
        elif per_gpu.value is None:
            message = "verl refuses to start: not given, and use_dynamic_bsz is off"
            yield hurts(per_gpu, message, "use_dynamic_bsz: True")


def _per_gpu(values: Values, prompts: float | None) -> float | None:
    """verl's own normalisation: the samples of `prompts` over the groups of GPUs that share sequences."""
    group, gpus = values.number(ROLLOUT + "n"), gpus_of(values)
    return prompts * group * _gpus_a_sequence(values) / gpus if prompts and group and gpus else None


def _gpus_a_sequence(values: Values) -> float:
    """The GPUs that work on one sequence together."""
    if not is_megatron(values):
        return as_number(_ulysses_of(values).value) or 1
    sizes = [values.number(f"{ACTOR}megatron.{name}_parallel_size") for name in _MEGATRON_SPLITS]
    return math.prod(size or 1 for size in sizes)


def _ulysses_of(values: Values, role: str = ACTOR) -> Setting:
    """The GPUs that share a sequence. The key that is deprecated overrides that of the engine."""
    engines = ("fsdp_config.ulysses_sequence", "fsdp.ulysses_sequence", "veomni.ulysses")
    settings = [values.at(f"{role}{name}_parallel_size") for name in ("ulysses_sequence", *engines)]
    return max(settings, key=lambda setting: as_number(setting.value) or 0)


def _has_stages(values: Values) -> bool:
    """True for Megatron's pipeline, which micro batches fill."""
    return is_megatron(values) and (values.whole(ACTOR + "megatron.pipeline_model_parallel_size") or 1) > 1


def _is_full(values: Values, subject: Subject, size: float) -> bool:
    """True if computing a pass of `size` hides the all-gather of a layer's weights, within a node or over several."""
    full = _FULL_PASS if values.whole("trainer.nnodes") == 1 else _FULL_PASS_OVER_NODES
    return _pass_tokens(values, subject, size) >= full


def _pass_tokens(values: Values, subject: Subject, size: float) -> float:
    """About the tokens on one GPU of a pass of `size`: a budget of tokens, or sequences, which are half as long as they
    may be. 0 where lengths are not known."""
    if _is_dynamic(values):
        return size
    shards = 1 if is_megatron(values) else _gpus_a_sequence(values)
    return size * (subject.workload.tokens or 0) / 2 / shards


@Rule(
    of_verl, "verl-micro-batch-size", "actor.ppo_micro_batch_size_per_gpu against ppo_mini_batch_size x n / GPUs",
    "More passes of fewer sequences do the same work with the GPU less full.", VERL_GUIDE, 0.1,
)  # fmt: skip
def _micro_batch_size(values: Values, subject: Subject) -> Iterator[Found]:
    micro, whole = values.at(ACTOR + "ppo_micro_batch_size_per_gpu"), values.number(ACTOR + "ppo_mini_batch_size")
    size, whole = as_number(micro.value), _per_gpu(values, whole)
    if _is_dynamic(values) or size is None or whole is None:
        return
    if size > whole:
        yield consider(micro, f"{size:g}, but a mini batch has {whole:g} sequences per GPU", f"{whole:g}")
    elif size < whole and not _has_stages(values) and not _is_full(values, subject, size):
        message = f"{size:g} of the {whole:g} sequences that a mini batch has per GPU: {whole / size:.0f} passes"
        yield consider(micro, message, f"as large as memory allows, up to {whole:g}")


@Rule(
    of_verl, "verl-dynamic-batches", "actor.use_dynamic_bsz, rollout.log_prob_use_dynamic_bsz",
    "Responses differ in length: with a budget of tokens every pass is as full as the others.",
    f"{VERL_GUIDE}; {VERL_CODE}", 0.2,
)  # fmt: skip
def _dynamic_batches(values: Values, subject: Subject) -> Iterator[Found]:
    setting, own = values.at(ACTOR + "use_dynamic_bsz"), values.at(ROLLOUT + "log_prob_use_dynamic_bsz")
    # A budget counts tokens, and padding is computed beside them.
    is_padded = is_fsdp(values) and values.at(MODEL + "use_remove_padding").value is False
    if setting.value is not True and not is_padded:
        message = "a micro batch is a number of sequences, and so as many tokens as chance has it"
        yield consider(setting, message, "True, with ppo_max_token_len_per_gpu at 2 to 3 times prompt + response")
    elif setting.value is True and own.value is False:
        yield hurts(own, "verl refuses it: it must equal actor.use_dynamic_bsz", "True")


@Rule(
    of_verl, "verl-token-budget", "actor.ppo_max_token_len_per_gpu, critic.ppo_max_token_len_per_gpu",
    "A budget near one sequence makes every pass one sequence.",
    f"{VERL_GUIDE}: at least 2 x (max_prompt_length + max_response_length); its example has 3 x", 0.2,
)  # fmt: skip
def _token_budget(values: Values, subject: Subject) -> Iterator[Found]:
    tokens = subject.workload.tokens
    context = values.number(ACTOR + "megatron.context_parallel_size") if is_megatron(values) else None
    for role in (ACTOR, "critic.") if _critic_runs(values) else (ACTOR,):
        setting, shards = values.at(role + "ppo_max_token_len_per_gpu"), as_number(_ulysses_of(values, role).value)
        held = (as_number(setting.value) or 0) * (context or shards or 1)
        if not held or not tokens or not _is_dynamic(values):
            continue
        instead = f"{2 * tokens} to {3 * tokens}"
        if held < tokens:
            yield hurts(setting, f"{held:.0f} tokens do not hold one sequence of {tokens}", instead)
        elif held < 2 * tokens and not _has_stages(values):
            message = f"{held:.0f} tokens are {held / tokens:.1f} times prompt + response ({tokens}): little is packed"
            yield consider(setting, message, instead)


@Rule(
    of_verl, "verl-pass-sizes",
    "log_prob_micro_batch_size_per_gpu or log_prob_max_token_len_per_gpu of ref and rollout, the critic's sizes",
    "Passes without gradients keep no activations, and the critic's last layer has one output.",
    f"{VERL_GUIDE}: for instance 2 x", is_general=True,
)  # fmt: skip
def _pass_sizes(values: Values, subject: Subject) -> Iterator[Found]:
    name = "max_token_len_per_gpu" if _is_dynamic(values) else "micro_batch_size_per_gpu"
    pairs = [(f"{ROLLOUT}log_prob_{name}", f"{ACTOR}ppo_{name}")]
    pairs += [(f"{REF}log_prob_{name}", f"{ACTOR}ppo_{name}")] if _reference_runs(values) else []
    if _critic_runs(values):
        pairs += [(f"critic.forward_{name}", f"critic.ppo_{name}"), (f"critic.ppo_{name}", f"{ACTOR}ppo_{name}")]
    samples = math.inf if _is_dynamic(values) else _per_gpu(values, values.number("data.train_batch_size")) or math.inf
    for key, than in pairs:
        training, size = values.number(than), values.number(key)
        is_full = size is not None and key != f"critic.ppo_{name}" and _is_full(values, subject, size)
        if training and size and size < min(2 * training, samples) and not _has_stages(values) and not is_full:
            yield consider(values.at(key), f"{size:g}, and {than} is {training:g}", f"{2 * training:g}")


@Rule(
    of_fsdp, "verl-remove-padding", "actor_rollout_ref.model.use_remove_padding, critic.model.use_remove_padding",
    "Lengths differ, and padding costs as much as tokens. Megatron packs by a key of its own, which is on.",
    VERL_GUIDE, 0.3,
)  # fmt: skip
def _remove_padding(values: Values, subject: Subject) -> Iterator[Found]:
    for section in (MODEL, "critic.model.") if _critic_runs(values) else (MODEL,):
        setting = values.at(section + "use_remove_padding")
        if setting.value is False:
            judge = hurts if _PACKED.search(values.text(section + "path")) and _is_on_cuda(values) else consider
            message = "every sequence is padded to the longest, and the padding is computed"
            yield judge(setting, message, "True (llama, mistral, gemma1, qwen; test other models)")


@Rule(
    of_fsdp, "verl-ulysses", "actor.fsdp_config.ulysses_sequence_parallel_size",
    "Above 32k tokens the activations of one sequence outgrow a GPU; below, splitting costs communication.",
    f"{VERL_GUIDE}; {VERL_CODE}, workers/config/actor.py",
)  # fmt: skip
def _ulysses(values: Values, subject: Subject) -> Iterator[Found]:
    setting, shards, tokens = _ulysses_of(values), _gpus_a_sequence(values), subject.workload.tokens
    if shards > 1 and not values.is_true(MODEL + "use_remove_padding"):
        yield hurts(setting, "verl refuses it without use_remove_padding", f"{MODEL}use_remove_padding: True")
    elif tokens and tokens > _LONG_CONTEXT and shards == 1:
        message = f"sequences of {tokens} tokens have all their activations on one GPU"
        yield hurts(setting, message, "2 or more, with smaller micro batches or token limits")
    elif tokens and tokens <= _LONG_CONTEXT and shards > 1:
        message = f"sequences of {tokens} tokens need no splitting over {shards:g} GPUs"
        yield consider(setting, message, "1, and micro batches that keep the tokens of a GPU")


@Rule(
    of_verl, "verl-activation-offload", "actor_rollout_ref.model.enable_activation_offload",
    "Together with gradient checkpointing it leaves room for larger micro batches. FSDP alone has it.", VERL_GUIDE,
)  # fmt: skip
def _activation_offload(values: Values, subject: Subject) -> Iterator[Found]:
    setting, strategy = values.at(MODEL + "enable_activation_offload"), values.text(ACTOR + "strategy")
    if setting.value is True and not strategy.startswith("fsdp"):
        yield hurts(setting, f"the FSDP backends alone have it, not {strategy}", "False")
    elif setting.value is True and not values.is_true(MODEL + "enable_gradient_checkpointing"):
        message = "without gradient checkpointing all activations cross the bus"
        yield consider(setting, message, "enable_gradient_checkpointing: True")
    elif setting.value is not True and (subject.workload.tokens or 0) >= 16_384:
        message = f"sequences of {subject.workload.tokens} tokens: larger micro batches need the room"
        yield consider(setting, message, "True")


@Rule(
    of_fsdp, "verl-entropy-memory", "actor.entropy_from_logits_with_chunking, actor.entropy_checkpointing",
    "Logits are [tokens, vocabulary]; entropy takes 4 + 2 + 1 bytes an entry, outside gradient checkpointing.",
    f"{VERL_GUIDE}: tokens x vocabulary x 7 bytes", is_general=True,
)  # fmt: skip
def _entropy(values: Values, subject: Subject) -> Iterator[Found]:
    """`entropy_from_logits_with_chunking` bounds the forward pass, `entropy_checkpointing` the training pass."""
    tokens = _tokens_of_a_pass(values, subject)
    if tokens <= _ENTROPY_CHUNK or values.is_true(MODEL + "use_fused_kernels"):
        return
    message = f"logits of {tokens:.0f} tokens are held whole: 7 bytes for each entry of the vocabulary"
    chunking = values.at(ACTOR + "entropy_from_logits_with_chunking")
    # verl computes the entropy of packed sequences alone in pieces.
    if chunking.value is not True and values.at(MODEL + "use_remove_padding").value is not False:
        yield consider(chunking, message, "True, under ref too", "logits in pieces of 2,048 tokens")
    needs_gradient = values.is_true(ACTOR + "calculate_entropy") or bool(values.number(ACTOR + "entropy_coeff"))
    checkpointing = values.at(ACTOR + "entropy_checkpointing")
    if needs_gradient and checkpointing.value is not True:
        instead = "True; gradient checkpointing leaves it out"
        yield consider(checkpointing, f"the training pass keeps it: {message}", instead)


def _tokens_of_a_pass(values: Values, subject: Subject) -> float:
    if _is_dynamic(values):
        return values.number(ACTOR + "ppo_max_token_len_per_gpu") or 0.0
    keys = (ROLLOUT + "log_prob_micro_batch_size_per_gpu", ACTOR + "ppo_micro_batch_size_per_gpu")
    return max(values.number(key) or 0.0 for key in keys) * (subject.workload.tokens or 0)


@Rule(
    of_verl, "verl-offload", "actor.fsdp_config.param_offload, optimizer_offload with hybrid_engine=False",
    "Offloading makes room for an engine on the trainer's GPUs; a trainer with GPUs of its own needs none.",
    VERL_PRACTICE, 0.1,
)  # fmt: skip
def _offload(values: Values, subject: Subject) -> Iterator[Found]:
    for name in ("param_offload", "optimizer_offload"):
        setting = values.at(f"{section_of(values)}.{name}")
        if setting.value is True and values.at("actor_rollout_ref.hybrid_engine").value is False:
            message = "no engine shares these GPUs: what is moved to the host comes back each step"
            yield consider(setting, message, "False")


@Rule(
    of_rollout, "verl-free-cache", "rollout.free_cache_engine",
    "On shared GPUs the trainer needs the KV cache's memory.", VERL_CODE,
)  # fmt: skip
def _free_cache(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ROLLOUT + "free_cache_engine")
    if setting.value is False and any(engine.owner == "verl" and engine.shares_gpu for engine in subject.engines):
        yield consider(setting, "the KV cache stays on the GPU while the trainer works", "True")


@Rule(
    of_rollout, "verl-sampling", "rollout.temperature, top_p, top_k, repetition_penalty",
    "The loss takes completions for draws from the whole distribution.",
    f"{VERL_CODE}; TRL's issues 6789 and 7269 on what cutting it does", 0.1,
)  # fmt: skip
def _sampling(values: Values, subject: Subject) -> Iterator[Found]:
    if (temperature := values.at(ROLLOUT + "temperature")).value == 0:
        yield hurts(temperature, "greedy: all samples of a prompt are one, and no advantage is left", "1.0")
    for name, off in (("top_p", (1, None)), ("top_k", (-1, 0, None)), ("repetition_penalty", (1, None))):
        setting = values.at(ROLLOUT + name)
        if setting.value not in off:
            message = f"{setting.value} changes the distribution that is drawn from, not the trainer's: ratios are "
            yield consider(setting, f"{message}biased", f"{off[0]}")


def _is_no_group(values: Values, key: str) -> bool:
    """True for one completion a prompt where they are compared; in distillation the teacher judges each token."""
    distils = values.is_true("distillation.enabled")
    is_judged = distils and values.at("distillation.distillation_loss.use_task_rewards").value is False
    return values.text("algorithm.adv_estimator") in _BY_GROUP and values.whole(key) == 1 and not is_judged


def _is_fsdp1(values: Values, key: str) -> bool:
    return values.text(key) == "fsdp" and gpus_of(values) != 1 and (key.startswith(ACTOR) or _critic_runs(values))


def _keeps_activations(values: Values, key: str) -> bool:
    return values.at(key).value is not True and (key.startswith(MODEL) or _critic_runs(values))


def _runs_unfused(values: Values, key: str) -> bool:
    is_known = _LIGER.search(values.text(MODEL + "path")) is not None
    return values.at(key).value is not True and _is_on_cuda(values) and is_known


TABLE = (
    row(
        Rule(of_stock_verl, "verl-group", "rollout.n with algorithm.adv_estimator",
             "Estimators by group take the mean of a prompt's completions as baseline.",
             f"{VERL_CODE}, trainer/ppo/core_algos.py", 1.0),
        ROLLOUT + "n", _is_no_group, hurts,
        "completions of one prompt are compared, and there is one: its advantage is no comparison", "8",
    ),
    row(
        Rule(of_verl, "verl-balance", "trainer.balance_batch", "Training waits for the GPU with the most tokens.",
             VERL_CODE, 0.1),
        "trainer.balance_batch", False, consider, "the GPU with the longest sequences keeps all others waiting", "True",
    ),
    row(
        Rule(of_fsdp, "verl-gradient-checkpointing", "model.enable_gradient_checkpointing of actor and critic",
             "It trades computing for memory, which larger micro batches then use.", VERL_GUIDE, 0.05),
        (MODEL + "enable_gradient_checkpointing", "critic.model.enable_gradient_checkpointing"), _keeps_activations,
        consider, "all activations are kept, which keeps micro batches small", "True",
    ),
    row(
        Rule(of_fsdp, "verl-fsdp2", "actor.strategy, critic.strategy",
             "It shards each parameter by itself and composes with torch.compile.", VERL_GUIDE, is_general=True),
        (ACTOR + "strategy", "critic.strategy"), _is_fsdp1, consider,
        "FSDP1; FSDP2 is verl's advice for new runs", "fsdp2",
        "verl's guide (FSDP1 to FSDP2): about 7 % less memory, 1.5 % more throughput in BF16",
    ),
    row(
        Rule(of_fsdp, "verl-liger", "actor_rollout_ref.model.use_liger",
             "Fewer kernels read and write activations.", VERL_GUIDE, is_general=True),
        MODEL + "use_liger", _runs_unfused, consider, "RMSNorm, SwiGLU and RoPE run unfused",
        "True, where liger-kernel is installed; measure it",
    ),
    row(
        Rule(of_verl, "verl-profiler", "global_profiler.tool, global_profiler.steps",
             "It shows which stage to tune, and slows what it watches.", VERL_GUIDE, is_general=True),
        "global_profiler.steps",
        lambda values, key: values.at(key).value is None and values.at("global_profiler.tool").value is not None,
        consider, "a profiler is chosen, and no step to profile", "[5, 6, 7]",
    ),
)  # fmt: skip
"""The rules about one value."""
