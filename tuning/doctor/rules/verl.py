"""Rules about verl's keys, and those of its rollout section that no other file has."""

import re
from collections.abc import Iterator

from tuning.doctor.files.verl import VerlFile
from tuning.doctor.finding import Found, consider, hurts
from tuning.doctor.known_keys import ROLLOUT, VERL
from tuning.doctor.rules.rule import VERL_CODE, VERL_PRACTICE, Rule, of_rollout, of_stock_verl, of_verl, of_verl_file
from tuning.doctor.subject import Subject
from tuning.doctor.trainer_memory import section_of
from tuning.doctor.values import Values

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


@Rule(
    of_stock_verl, "verl-group", "rollout.n with algorithm.adv_estimator",
    "Estimators by group take the mean of a prompt's completions as baseline.",
    f"{VERL_CODE}, trainer/ppo/core_algos.py", 1.0,
)  # fmt: skip
def _group(values: Values, subject: Subject) -> Iterator[Found]:
    """In distillation the teacher judges each token, and one completion a prompt is enough."""
    distils = values.is_true("distillation.enabled")
    is_judged = distils and values.at("distillation.distillation_loss.use_task_rewards").value is False
    setting = values.at(ROLLOUT + "n")
    if values.text("algorithm.adv_estimator") in _BY_GROUP and setting.value == 1 and not is_judged:
        message = "completions of one prompt are compared, and there is one: its advantage is no comparison"
        yield hurts(setting, message, "8")
