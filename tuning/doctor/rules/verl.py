"""Rules about verl's trainer."""

import math
import re
from collections.abc import Iterator

from gateway.config.load import Setting
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.finding import Found, consider, fine, hurts
from tuning.doctor.known_keys import ACTOR, ROLLOUT, VERL, VerlKeys
from tuning.doctor.model_size import USUAL_VOCABULARY, vocabulary
from tuning.doctor.rules.rule import (
    VERL_CODE,
    VERL_GUIDE,
    VERL_PRACTICE,
    fsdp_rule,
    stock_verl_rule,
    verl_file_rule,
    verl_rollout_rule,
    verl_trainer_rule,
)
from tuning.doctor.subject import Subject
from tuning.doctor.trainer_memory import gpus_of, is_fsdp, is_megatron, section_of
from tuning.doctor.values import Values, as_number

REF = "actor_rollout_ref.ref."
MODEL = "actor_rollout_ref.model."

_MIGRATION = "verl's guide (FSDP1 to FSDP2): about 7 % less memory, 1.5 % more throughput in BF16"
# float32 logits, autocast for softmax and logsumexp, the softmax's output: bytes per entry of [tokens, vocabulary].
_ENTROPY_BYTES = 7
_LONG_CONTEXT = 32_768
# Tokens of a pass on one GPU. With many, gathering the weights is a small share of the computing. With few, kernels are
# so short that their launches on the CPU are waited for.
_FULL_PASS, _FULL_PASS_OVER_NODES = 8_192, 16_384
_SHORT_PASS = 4_096
# Tokens that verl's chunked entropy computes at a time.
_ENTROPY_CHUNK = 2_048
# Models that liger-kernel has kernels for, but for those with images, which verl patches in the same place.
_LIGER = re.compile(
    r"llama|mistral|mixtral|gemma|phi-?[34]|qwen(?!.*(vl|moe|omni|a\d+b))|deepseek-(llm|math)", re.IGNORECASE
)


@verl_file_rule(
    id="verl-keys",
    asks="Does verl have each key that is given?",
    reads="every key",
    why="A key that was renamed sets nothing, or ends the run.",
    source="verl's trainer/config/*.yaml, composed by Hydra, of release 0.9.1",
    gain=1.0,
)
def _unknown_keys(file: VerlFile, subject: Subject) -> Iterator[Found]:
    """Keys that verl lacks. A run from a command ends at one; from a file it is left unread."""
    if not file.keys.is_complete:
        return
    says = f"Hydra ends the run: {VERL} has no such key" if file.overrides else f"{VERL} leaves it unread"
    given = {file.full_key(setting.key) for setting in file.given}
    for setting in file.given:
        if new := file.keys.renamed(file.full_key(setting.key)):
            instead = f"{file.values.shown(new)} has its value already: leave it out"
            yield hurts(setting, says, instead if new in given else file.values.shown(new))
    for override in file.overrides:
        if override.plus == "+" and isinstance(file.keys.defaults.get(override.key), (bool, int, float)):
            message = f"Hydra ends the run: {VERL} has this key already, and takes it without a plus"
            yield hurts(override.setting, message, f"{override.key}={override.setting.value}")
    if not file.is_stock:
        names = ", ".join(setting.key for setting in file.unknown)
        message = f"{VERL} lacks {len(file.unknown)} keys: a fork or another release reads them. They are: {names}"
        yield consider(file.unknown[0], message, "judge it by the software that will run it")
    elif file.overrides:
        yield from (hurts(setting, says, _instead_of(setting, file.keys)) for setting in file.unknown)
        yield from (hurts(setting, says, f"+{setting.key}={setting.value}") for setting in _without_plus(file))
    else:
        near = ((setting, file.keys.nearest(file.full_key(setting.key))) for setting in file.unknown)
        yield from (hurts(one, says, f"did you mean {file.values.shown(key)}?") for one, key in near if key)


def _instead_of(setting: Setting, keys: VerlKeys) -> str:
    near = keys.nearest(setting.key)
    return f"did you mean {near}?" if near else "leave it out"


def _without_plus(file: VerlFile) -> list[Setting]:
    """The keys of free dictionaries, which Hydra takes with a plus alone."""
    keys = file.keys
    return [one for one in file.given if not keys.has(one.key) and not keys.renamed(one.key) and keys.is_free(one.key)]


# Keys of names and places, with which nothing can be wrong that a file shows.
_LABEL = re.compile(r"\b(trainer\.(project_name|experiment_name|default_local_dir)|data\.(train|val)_files)=")


@verl_file_rule(
    id="verl-unread",
    asks="Was everything read?",
    reads="the script's commands",
    why="A rule is silent on a value that it does not have.",
    source="GNU Bash manual, The Restricted Shell",
    gain=0.0,
)
def _unread(file: VerlFile, subject: Subject) -> Iterator[Found]:
    for text in file.unread:
        if _LABEL.search(text):
            yield fine(None, f"{text}; no rule reads it")
        else:
            yield consider(None, text, "judge it by hand, or give the YAML that --cfg job prints")


@verl_file_rule(
    id="verl-lost-overrides",
    asks="Does each override reach the command?",
    reads="the script's lines",
    why="In a shell a comment or an empty line ends a command that a backslash continued.",
    source="POSIX shell, token recognition",
    gain=1.0,
)
def _lost_overrides(file: VerlFile, subject: Subject) -> Iterator[Found]:
    lost = [override for override in file.overrides if override.is_lost]
    if lost:
        first = lost[0].setting
        message = (
            f"{len(lost)} overrides from here on belong to no command: the one above ended before them, at a comment, "
            "an empty line or a line without a backslash at its very end"
        )
        yield hurts(first, message, "no comments or empty lines between continued lines")


def _critic_runs(values: Values) -> bool:
    """verl's need_critic."""
    enabled = values.at("critic.enable").value
    return bool(enabled) if enabled is not None else values.text("algorithm.adv_estimator") == "gae"


def _reference_runs(values: Values) -> bool:
    return values.is_true("algorithm.use_kl_in_reward") or values.is_true(ACTOR + "use_kl_loss")


@stock_verl_rule(
    id="verl-batches",
    asks="Do batches divide?",
    reads="data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, trainer.n_gpus_per_node, nnodes",
    why="These are global numbers, which verl shares out over all GPUs.",
    source=f"{VERL_CODE}, utils/config.py and workers/config/actor.py",
    gain=1.0,
)
def _batches(values: Values, subject: Subject) -> Iterator[Found]:
    batch, setting = values.whole("data.train_batch_size"), values.at("data.train_batch_size")
    mini, group, gpus = values.whole(ACTOR + "ppo_mini_batch_size"), values.whole(ROLLOUT + "n"), gpus_of(values)
    if not batch or not mini or not group or not gpus or values.is_true(ACTOR + "use_dynamic_bsz"):
        return
    if batch < mini:
        yield hurts(setting, f"verl refuses it: smaller than ppo_mini_batch_size {mini}", f"{mini} or more")
    elif values.text(ACTOR + "strategy") != "megatron" and batch * group % gpus:
        yield hurts(
            setting,
            f"verl refuses it: {batch} x n {group} is not divisible by {gpus} GPUs",
            f"{-(-batch // gpus) * gpus}",
        )
    elif batch % mini:
        yield consider(
            setting, f"no multiple of ppo_mini_batch_size {mini}: the last mini batch is short", "a multiple"
        )
    else:
        yield fine(setting, f"{batch // mini} updates of {mini} prompts a step")


@stock_verl_rule(
    id="verl-micro-batches",
    asks="Is each micro batch given, per GPU?",
    reads="*_micro_batch_size, *_micro_batch_size_per_gpu",
    why="Micro batches are local: what one GPU computes in one pass.",
    source=f"{VERL_GUIDE}; {VERL_CODE}, utils/config.py",
    gain=1.0,
)
def _micro_batches_given(values: Values, subject: Subject) -> Iterator[Found]:
    if values.is_true(ACTOR + "use_dynamic_bsz"):
        return
    for section, name in _micro_batch_keys(values):
        old, per_gpu = values.at(section + name), values.at(f"{section}{name}_per_gpu")
        if old.value is not None and old.origin != "default" and per_gpu.value is not None:
            yield hurts(old, f"verl refuses it beside {per_gpu.key}", f"leave {old.key} out")
        elif old.value is not None:
            message = "counted over all GPUs and deprecated: it has to change with their number"
            yield consider(old, message, f"{per_gpu.key}")
        elif per_gpu.value is None:
            yield hurts(
                per_gpu, "verl refuses to start: not given, and use_dynamic_bsz is off", "use_dynamic_bsz: True"
            )


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


_MEGATRON_SPLITS = ("tensor_model", "pipeline_model", "context")


def _stages(values: Values) -> int:
    """The stages of Megatron's pipeline, which micro batches fill; 1 without one."""
    size = values.whole(ACTOR + "megatron.pipeline_model_parallel_size") if is_megatron(values) else None
    return size or 1


def _full_pass(values: Values) -> int:
    """Tokens whose computing hides the all-gather of a layer's weights, within a node or over several."""
    return _FULL_PASS if values.whole("trainer.nnodes") == 1 else _FULL_PASS_OVER_NODES


def _pass_tokens(values: Values, subject: Subject, size: float) -> float:
    """About the tokens on one GPU of a pass of `size`: a budget of tokens, or sequences, which are half as long as they
    may be. 0 where lengths are not known."""
    if values.is_true(ACTOR + "use_dynamic_bsz"):
        return size
    shards = 1 if is_megatron(values) else _gpus_a_sequence(values)
    return size * (subject.workload.tokens or 0) / 2 / shards


@verl_trainer_rule(
    id="verl-micro-batch-size",
    asks="Is the micro batch as large as it can be?",
    reads="actor.ppo_micro_batch_size_per_gpu against ppo_mini_batch_size x n / GPUs",
    why="More passes of fewer sequences do the same work with the GPU less full.",
    source=VERL_GUIDE,
    gain=0.1,
)
def _micro_batch_size(values: Values, subject: Subject) -> Iterator[Found]:
    micro, whole = (
        values.at(ACTOR + "ppo_micro_batch_size_per_gpu"),
        _per_gpu(values, values.number(ACTOR + "ppo_mini_batch_size")),
    )
    size = as_number(micro.value)
    if values.is_true(ACTOR + "use_dynamic_bsz") or size is None or whole is None:
        return
    if size < whole and _stages(values) > 1:
        yield fine(micro, f"{whole / size:.0f} micro batches fill a pipeline of {_stages(values)} stages")
    elif size < whole and (held := _pass_tokens(values, subject, size)) >= _full_pass(values):
        yield fine(micro, f"{size:g} sequences of about {held / size:.0f} tokens fill a pass")
    elif size < whole:
        message = f"{size:g} of the {whole:g} sequences that a mini batch has per GPU: {whole / size:.0f} passes"
        yield consider(micro, message, f"as large as memory allows, up to {whole:g}")
    elif size > whole:
        yield consider(micro, f"{size:g}, but a mini batch has {whole:g} sequences per GPU", f"{whole:g}")
    else:
        yield fine(micro, "a mini batch is one pass")


@verl_trainer_rule(
    id="verl-dynamic-batches",
    asks="Do micro batches hold tokens rather than sequences?",
    reads="actor.use_dynamic_bsz, rollout.log_prob_use_dynamic_bsz",
    why="Responses differ in length: with a budget of tokens every pass is as full as the others.",
    source=f"{VERL_GUIDE}; {VERL_CODE}",
    gain=0.2,
)
def _dynamic_batches(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ACTOR + "use_dynamic_bsz")
    if setting.value is not True and is_fsdp(values) and values.at(MODEL + "use_remove_padding").value is False:
        yield fine(setting, "a budget counts tokens, and padding is computed beside them: use_remove_padding first")
        return
    if setting.value is not True:
        message = "a micro batch is a number of sequences, and so as many tokens as chance has it"
        yield consider(setting, message, "True, with ppo_max_token_len_per_gpu at 2 to 3 times prompt + response")
        return
    yield fine(setting, "micro batches hold a number of tokens")
    own = values.at(ROLLOUT + "log_prob_use_dynamic_bsz")
    if own.value is False:
        yield hurts(own, "verl refuses it: it must equal actor.use_dynamic_bsz", "True")


@verl_trainer_rule(
    id="verl-token-budget",
    asks="Is the budget at least twice prompt + response?",
    reads="actor.ppo_max_token_len_per_gpu, critic.ppo_max_token_len_per_gpu",
    why="A budget near one sequence makes every pass one sequence.",
    source=f"{VERL_GUIDE}: at least 2 x (max_prompt_length + max_response_length); its example has 3 x",
    gain=0.2,
)
def _token_budget(values: Values, subject: Subject) -> Iterator[Found]:
    tokens = subject.workload.tokens
    if not values.is_true(ACTOR + "use_dynamic_bsz") or not tokens:
        return
    context = values.number(ACTOR + "megatron.context_parallel_size") if is_megatron(values) else None
    for role in (ACTOR, "critic.") if _critic_runs(values) else (ACTOR,):
        setting = values.at(role + "ppo_max_token_len_per_gpu")
        budget, shards = as_number(setting.value), as_number(_ulysses_of(values, role).value)
        held = None if budget is None else budget * (context or shards or 1)
        if held is None:
            continue
        if held < tokens:
            yield hurts(
                setting, f"{held:.0f} tokens do not hold one sequence of {tokens}", f"{2 * tokens} to {3 * tokens}"
            )
        elif held < 2 * tokens and _stages(values) > 1:
            yield fine(setting, f"{held / tokens:.1f} times prompt + response: a pipeline wants many micro batches")
        elif held < 2 * tokens:
            message = f"{held:.0f} tokens are {held / tokens:.1f} times prompt + response ({tokens}): little is packed"
            yield consider(setting, message, f"{2 * tokens} to {3 * tokens}")
        else:
            yield fine(setting, f"{held / tokens:.1f} times prompt + response ({tokens})")


@verl_trainer_rule(
    id="verl-forward-only",
    asks="Are passes without gradients larger than those that train?",
    reads="ref and rollout log_prob_micro_batch_size_per_gpu or log_prob_max_token_len_per_gpu, critic.forward_*",
    why="They keep no activations for a backward pass.",
    source=f"{VERL_GUIDE}: for instance 2 x",
    is_general=True,
)
def _forward_only(values: Values, subject: Subject) -> Iterator[Found]:
    """Passes without gradients keep no activations, so they may be larger than those that train."""
    for key, than, is_critic in _forward_pairs(values):
        setting, training = values.at(key), values.number(than)
        size = values.number(key)
        if size is None or not training or (is_critic and not _critic_runs(values)):
            continue
        samples = _per_gpu(values, values.number("data.train_batch_size"))
        if _stages(values) > 1:
            yield fine(setting, f"micro batches fill a pipeline of {_stages(values)} stages")
        elif _pass_tokens(values, subject, size) >= _full_pass(values):
            yield fine(setting, f"{size:g} fill a pass")
        elif samples and not values.is_true(ACTOR + "use_dynamic_bsz") and size >= samples:
            yield fine(setting, f"one pass holds the {samples:g} samples of a GPU")
        elif size < 2 * training:
            message = f"{size:g}, and the training pass has {training:g}; this one keeps no activations"
            yield consider(setting, message, f"{2 * training:g}")
        else:
            yield fine(setting, f"{size / training:.1f} times that of the training pass")


def _forward_pairs(values: Values) -> Iterator[tuple[str, str, bool]]:
    size = "max_token_len_per_gpu" if values.is_true(ACTOR + "use_dynamic_bsz") else "micro_batch_size_per_gpu"
    yield f"{ROLLOUT}log_prob_{size}", f"{ACTOR}ppo_{size}", False
    if _reference_runs(values):
        yield f"{REF}log_prob_{size}", f"{ACTOR}ppo_{size}", False
    yield f"critic.forward_{size}", f"critic.ppo_{size}", True


@verl_trainer_rule(
    id="verl-critic-batches",
    asks="Are the critic's batches larger than the actor's?",
    reads="critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu",
    why="The actor's last layer has an output for each entry of the vocabulary, the critic's one.",
    source=f"{VERL_GUIDE}: at least 2 x the actor's",
    is_general=True,
)
def _critic_batches(values: Values, subject: Subject) -> Iterator[Found]:
    if not _critic_runs(values):
        return
    is_dynamic = values.is_true(ACTOR + "use_dynamic_bsz")
    name = "ppo_max_token_len_per_gpu" if is_dynamic else "ppo_micro_batch_size_per_gpu"
    setting, actor, critic = values.at(f"critic.{name}"), values.number(ACTOR + name), values.number(f"critic.{name}")
    if actor is None or critic is None:
        return
    if critic < 2 * actor and _stages(values) > 1:
        yield fine(setting, f"micro batches fill a pipeline of {_stages(values)} stages")
    elif critic < 2 * actor:
        yield consider(
            setting, f"{critic:g}, the actor's is {actor:g}; its last layer has one output", f"{2 * actor:g}"
        )
    else:
        yield fine(setting, f"{critic / actor:.1f} times the actor's")


@fsdp_rule(
    id="verl-remove-padding",
    asks="Are sequences packed?",
    reads="actor_rollout_ref.model.use_remove_padding, critic.model.use_remove_padding",
    why="Lengths differ, and padding costs as much as tokens.",
    source=VERL_GUIDE,
    gain=0.3,
)
def _remove_padding(values: Values, subject: Subject) -> Iterator[Found]:
    # Megatron packs by a key of its own, which is on.
    for key in (MODEL, *(["critic.model."] if _critic_runs(values) else [])):
        setting = values.at(key + "use_remove_padding")
        if setting.value is False:
            message = "every sequence is padded to the longest, and the padding is computed"
            judge = hurts if _packs(values.text(key + "path")) and _is_on_cuda(values) else consider
            yield judge(setting, message, "True (llama, mistral, gemma1, qwen; test other models)")
        else:
            yield fine(setting, "sequences are packed")


def _packs(model: str) -> bool:
    """True if verl's guide names the model's kind among those that it packs."""
    return bool(re.search(r"llama|mistral|qwen|deepseek-llm|deepseek-math", model.lower()))


def _is_on_cuda(values: Values) -> bool:
    return values.text("trainer.device") in ("", "cuda")


def _micro_batch_keys(values: Values) -> Iterator[tuple[str, str]]:
    """The section and the name, without _per_gpu, of each micro batch that a run needs."""
    yield ACTOR, "ppo_micro_batch_size"
    yield ROLLOUT, "log_prob_micro_batch_size"
    if _reference_runs(values):
        yield REF, "log_prob_micro_batch_size"
    if _critic_runs(values):
        yield "critic.", "ppo_micro_batch_size"


@fsdp_rule(
    id="verl-ulysses",
    asks="Are long sequences split over GPUs, and short ones not?",
    reads="actor.fsdp_config.ulysses_sequence_parallel_size",
    why="Above 32k tokens the activations of one sequence outgrow a GPU; below, splitting costs communication.",
    source=f"{VERL_GUIDE}; {VERL_CODE}, workers/config/actor.py",
)
def _ulysses(values: Values, subject: Subject) -> Iterator[Found]:
    setting, shards, tokens = _ulysses_of(values), _gpus_a_sequence(values), subject.workload.tokens
    if shards > 1 and not values.is_true(MODEL + "use_remove_padding"):
        yield hurts(
            setting, "verl refuses it without use_remove_padding", "actor_rollout_ref.model.use_remove_padding: True"
        )
    elif not tokens:
        return
    elif tokens > _LONG_CONTEXT and shards == 1:
        message = f"sequences of {tokens} tokens have all their activations on one GPU"
        yield hurts(setting, message, "2 or more, with smaller micro batches or token limits")
    elif tokens <= _LONG_CONTEXT and shards > 1:
        message = f"sequences of {tokens} tokens need no splitting over {shards:g} GPUs"
        yield consider(setting, message, f"1{_smaller_micro_batch(values, shards)}")
    else:
        yield fine(setting, f"sequences of at most {tokens} tokens")


def _smaller_micro_batch(values: Values, shards: float) -> str:
    """The change of a micro batch by count that keeps the tokens of a GPU as they are without the splitting."""
    micro = values.number(ACTOR + "ppo_micro_batch_size_per_gpu")
    if not micro or micro <= 1 or values.is_true(ACTOR + "use_dynamic_bsz"):
        return ""
    return f", and ppo_micro_batch_size_per_gpu {max(1, micro // shards):g}"


@fsdp_rule(
    id="verl-gradient-checkpointing",
    asks="Is gradient checkpointing on?",
    reads="actor_rollout_ref.model.enable_gradient_checkpointing, critic.model.enable_gradient_checkpointing",
    why="It trades computing for memory, which larger micro batches then use.",
    source=VERL_GUIDE,
    gain=0.05,
)
def _gradient_checkpointing(values: Values, subject: Subject) -> Iterator[Found]:
    for key in (MODEL, *(["critic.model."] if _critic_runs(values) else [])):
        setting = values.at(key + "enable_gradient_checkpointing")
        if setting.value is True:
            yield fine(setting, "activations are computed again, which leaves room for larger micro batches")
        else:
            yield consider(setting, "all activations are kept, which keeps micro batches small", "True")


@verl_trainer_rule(
    id="verl-activation-offload",
    asks="Could activations leave the GPU?",
    reads="actor_rollout_ref.model.enable_activation_offload",
    why="Together with gradient checkpointing it leaves room for larger micro batches. FSDP alone has it.",
    source=VERL_GUIDE,
)
def _activation_offload(values: Values, subject: Subject) -> Iterator[Found]:
    setting, strategy = values.at(MODEL + "enable_activation_offload"), values.text(ACTOR + "strategy")
    if setting.value is True and not strategy.startswith("fsdp"):
        yield hurts(setting, f"the FSDP backends alone have it, not {strategy}", "False")
    elif setting.value is True and values.is_true(MODEL + "enable_gradient_checkpointing"):
        yield fine(setting, "activations go to the host")
    elif setting.value is True:
        message = "without gradient checkpointing all activations cross the bus"
        yield consider(setting, message, "enable_gradient_checkpointing: True")
    elif (subject.workload.tokens or 0) >= 16_384:
        yield consider(
            setting, f"sequences of {subject.workload.tokens} tokens: larger micro batches need the room", "True"
        )
    else:
        yield fine(setting, "off; worth it where memory keeps micro batches small")


@fsdp_rule(
    id="verl-entropy-memory",
    asks="Does the entropy of the logits fit?",
    reads="actor.entropy_from_logits_with_chunking, actor.entropy_checkpointing",
    why="Logits are [tokens, vocabulary]; entropy takes 4 + 2 + 1 bytes an entry, outside gradient checkpointing.",
    source=f"{VERL_GUIDE}: tokens x vocabulary x 7 bytes",
    is_general=True,
)
def _entropy(values: Values, subject: Subject) -> Iterator[Found]:
    """`entropy_from_logits_with_chunking` bounds the forward pass, `entropy_checkpointing` the training pass."""
    tokens = _tokens_of_a_pass(values, subject)
    if tokens is None:
        return
    entries = vocabulary(values.text(MODEL + "path"))
    size = tokens * (entries or USUAL_VOCABULARY) * _ENTROPY_BYTES / 2**30
    how = f"{tokens:.0f} tokens x {entries or USUAL_VOCABULARY:,} entries{'' if entries else ' (Qwen2)'} x 7 bytes"
    message = f"entropy of all logits at once takes up to {size:.1f} GiB: {how}"
    effect = "logits in pieces of 2,048 tokens: at most "
    effect += f"{_ENTROPY_CHUNK * (entries or USUAL_VOCABULARY) * _ENTROPY_BYTES / 2**30:.1f} GiB"
    chunking = values.at(ACTOR + "entropy_from_logits_with_chunking")
    if tokens <= _ENTROPY_CHUNK:
        yield fine(chunking, f"a pass of {tokens:.0f} tokens is one piece")
        return
    if values.is_true(MODEL + "use_fused_kernels"):
        yield fine(values.at(MODEL + "use_fused_kernels"), "fused kernels compute entropy without the whole logits")
        return
    if values.at(MODEL + "use_remove_padding").value is False:
        yield fine(chunking, "verl computes the entropy of packed sequences alone in pieces")
    elif chunking.value is True:
        yield fine(chunking, "entropy is computed in pieces")
    else:
        yield consider(chunking, message, "True, under ref too", effect)
    needs_gradient = values.is_true(ACTOR + "calculate_entropy") or bool(values.number(ACTOR + "entropy_coeff"))
    checkpointing = values.at(ACTOR + "entropy_checkpointing")
    if checkpointing.value is True or not needs_gradient:
        why = "on" if checkpointing.value is True else "no entropy in the loss (entropy_coeff 0)"
        yield fine(checkpointing, why)
    else:
        yield consider(
            checkpointing, f"the training pass keeps it: {message}", "True; gradient checkpointing leaves it out"
        )


def _tokens_of_a_pass(values: Values, subject: Subject) -> float | None:
    if values.is_true(ACTOR + "use_dynamic_bsz"):
        return values.number(ACTOR + "ppo_max_token_len_per_gpu")
    sizes = [values.number(ROLLOUT + "log_prob_micro_batch_size_per_gpu")]
    sizes += [values.number(ACTOR + "ppo_micro_batch_size_per_gpu")]
    largest = max((size for size in sizes if size), default=None)
    return largest * subject.workload.tokens if largest and subject.workload.tokens else None


@fsdp_rule(
    id="verl-fsdp2",
    asks="Is it FSDP2?",
    reads="actor.strategy, critic.strategy",
    why="It shards each parameter by itself and composes with torch.compile.",
    source=VERL_GUIDE,
    is_general=True,
)
def _fsdp2(values: Values, subject: Subject) -> Iterator[Found]:
    for key in (ACTOR + "strategy", *(["critic.strategy"] if _critic_runs(values) else [])):
        setting = values.at(key)
        if setting.value == "fsdp" and gpus_of(values) == 1:
            yield fine(setting, "one GPU has nothing to shard")
        elif setting.value == "fsdp":
            yield consider(setting, "FSDP1; FSDP2 is verl's advice for new runs", "fsdp2", _MIGRATION)
        else:
            yield fine(setting, f"{setting.value}")


@fsdp_rule(
    id="verl-forward-prefetch",
    asks="Is the next layer gathered early?",
    reads="actor.fsdp_config.forward_prefetch",
    why="Communication then overlaps with computing.",
    source=VERL_GUIDE,
    is_general=True,
)
def _forward_prefetch(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ACTOR + "fsdp_config.forward_prefetch")
    if gpus_of(values) == 1:
        yield fine(setting, "one GPU has nothing to gather")
    elif values.text(ACTOR + "strategy") == "fsdp2":
        yield fine(setting, "FSDP2 gathers the next layer by itself; verl passes the key to FSDP1 alone")
    elif setting.value is True:
        yield fine(setting, "the next layer is gathered while one is computed")
    elif (tokens := _training_tokens(values, subject)) is None:
        yield fine(setting, "of use where passes are so short that the GPU waits for the CPU")
    elif tokens >= _SHORT_PASS:
        yield fine(setting, f"a pass has about {tokens:.0f} tokens: the GPU computes while the CPU is layers ahead")
    else:
        message = f"a pass has about {tokens:.0f} tokens: the GPU waits for the CPU to issue each all-gather"
        yield consider(setting, message, "True")


def _training_tokens(values: Values, subject: Subject) -> float | None:
    """About the tokens on one GPU of a pass that trains; None where its size is not known."""
    name = "ppo_max_token_len_per_gpu" if values.is_true(ACTOR + "use_dynamic_bsz") else "ppo_micro_batch_size_per_gpu"
    size = values.number(ACTOR + name)
    return None if size is None else _pass_tokens(values, subject, size) or None


@fsdp_rule(
    id="verl-liger",
    asks="Are fused kernels used?",
    reads="actor_rollout_ref.model.use_liger",
    why="Fewer kernels read and write activations.",
    source=VERL_GUIDE,
    is_general=True,
)
def _liger(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(MODEL + "use_liger")
    if setting.value is True:
        yield fine(setting, "fused RMSNorm, SwiGLU and RoPE")
    elif not _is_on_cuda(values) or not _LIGER.search(values.text(MODEL + "path")):
        return
    else:
        message = "RMSNorm, SwiGLU and RoPE run unfused"
        yield consider(setting, message, "True, where liger-kernel is installed; measure it")


@verl_trainer_rule(
    id="verl-offload",
    asks="Is anything offloaded without need?",
    reads="actor.fsdp_config.param_offload, optimizer_offload with hybrid_engine=False",
    why="Offloading makes room for an engine on the trainer's GPUs; a trainer with GPUs of its own needs none.",
    source=VERL_PRACTICE,
    gain=0.1,
)
def _offload(values: Values, subject: Subject) -> Iterator[Found]:
    if values.at("actor_rollout_ref.hybrid_engine").value is not False:
        return
    for name in ("param_offload", "optimizer_offload"):
        setting = values.at(f"{section_of(values)}.{name}")
        if setting.value is True:
            yield consider(
                setting, "no engine shares these GPUs: what is moved to the host comes back each step", "False"
            )


@verl_rollout_rule(
    id="verl-free-cache",
    asks="Does the engine give its memory back?",
    reads="rollout.free_cache_engine",
    why="On shared GPUs the trainer needs the KV cache's memory.",
    source=VERL_CODE,
)
def _free_cache(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ROLLOUT + "free_cache_engine")
    shares = any(engine.owner == "verl" and engine.shares_gpu for engine in subject.engines)
    if setting.value is False and shares:
        yield consider(setting, "the KV cache stays on the GPU while the trainer works", "True")
    elif shares:
        yield fine(setting, "the KV cache is given back after generation")
    else:
        yield fine(setting, "no trainer on these GPUs wants the memory")


@verl_rollout_rule(
    id="verl-sampling",
    asks="Are completions drawn from the policy itself?",
    reads="rollout.temperature, top_p, top_k",
    why="The loss takes completions for draws from the whole distribution.",
    source=f"{VERL_CODE}; TRL's issues 6789 and 7269 on what cutting it does",
    gain=0.1,
)
def _sampling(values: Values, subject: Subject) -> Iterator[Found]:
    for name, off in (("temperature", None), ("top_p", (1, None)), ("top_k", (-1, 0, None))):
        setting = values.at(ROLLOUT + name)
        if off and setting.value not in off:
            message = f"{setting.value} cuts the distribution that is drawn from, not the trainer's: ratios are biased"
            yield consider(setting, message, f"{off[0]}")
        elif name == "temperature" and setting.value == 0:
            yield hurts(setting, "greedy: all samples of a prompt are one, and no advantage is left", "1.0")
        else:
            yield fine(setting, f"{setting.value}: the policy itself")


@verl_trainer_rule(
    id="verl-balance",
    asks="Is work spread evenly?",
    reads="trainer.balance_batch",
    why="Training waits for the GPU with the most tokens.",
    source=VERL_CODE,
    gain=0.1,
)
def _balance(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at("trainer.balance_batch")
    if setting.value is False:
        yield consider(setting, "the GPU with the longest sequences keeps all others waiting", "True")
    else:
        yield fine(setting, "tokens are spread evenly over GPUs")


@verl_trainer_rule(
    id="verl-profiler",
    asks="Is the profiler off when it is not looked at?",
    reads="global_profiler.tool, global_profiler.steps",
    why="It shows which stage to tune, and slows what it watches.",
    source=VERL_GUIDE,
    is_general=True,
)
def _profiler(values: Values, subject: Subject) -> Iterator[Found]:
    tool, steps = values.at("global_profiler.tool"), values.at("global_profiler.steps")
    if tool.value is None:
        yield fine(tool, "off; nsys or torch for some steps shows where time goes")
    elif steps.value is None:
        yield consider(steps, f"{tool.value} is chosen, and no step to profile", "[5, 6, 7]")
    else:
        yield fine(steps, f"{tool.value} slows the steps {steps.value}, and no others")


@verl_trainer_rule(
    id="verl-prometheus",
    asks="Can Prometheus see the engine?",
    reads="rollout.prometheus.enable, rollout.disable_log_stats",
    why="It shows the engine's statistics, which disable_log_stats turns off.",
    source=VERL_CODE,
    gain=1.0,
)
def _prometheus(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ROLLOUT + "prometheus.enable")
    if setting.value is True and values.is_true(ROLLOUT + "disable_log_stats"):
        yield hurts(setting, "verl refuses it while disable_log_stats is True", "disable_log_stats: False")
