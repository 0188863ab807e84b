"""Rules about single values of verl's that no default has: their type, names of choices, and contradictions."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from tuning.doctor.files.shell_script import is_known
from tuning.doctor.files.verl import VerlFile
from tuning.doctor.finding import Found, consider, hurts
from tuning.doctor.known_keys import ACTOR, ROLLOUT
from tuning.doctor.rules.rule import (
    VERL_CODE,
    stock_verl_rule,
    verl_file_rule,
    verl_rollout_rule,
    verl_trainer_rule,
)
from tuning.doctor.subject import Subject
from tuning.doctor.values import Values

# Of verl 0.9.1. A run may register estimators and losses of its own.
_ENGINES = ("vllm", "sglang", "trtllm", "hf", "sglang_async")
_MISSING = "???"  # of OmegaConf
_MODES = ("sync", "async")
_NUMBER_OR_RANGE = "algorithm.rollout_correction.rollout_is_threshold"  # "0.5_4.0" too
_TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
_ESTIMATORS = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "grpo_passk", "gpg",
    "rloo_vectorized", "grpo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo",
)  # fmt: skip
_LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
    "bypass_mode",
)  # fmt: skip
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_CLOSED = {ROLLOUT + "name": _ENGINES, ROLLOUT + "mode": _MODES, ACTOR + "loss_agg_mode": _AGGREGATIONS}
_OPEN = {"algorithm.adv_estimator": _ESTIMATORS, ACTOR + "policy_loss.loss_mode": _LOSSES}
# Their advantage is what a completion earns beside others of its prompt.
_BY_GROUP = ("grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gdpo", "gpg")


@verl_file_rule(
    id="verl-types",
    asks="Does each value have its key's type?",
    reads="every key",
    why="Text where a number or a boolean is expected ends the run, or counts as true.",
    source=f"{VERL_CODE}, the defaults of its configuration",
    gain=1.0,
)
def _types(file: VerlFile, subject: Subject) -> Iterator[Found]:
    for setting in file.values:
        default = file.keys.defaults.get(setting.key if file.has_trainer else ROLLOUT + setting.key)
        if (
            setting.key != _NUMBER_OR_RANGE
            and is_known(setting.value)
            and (wanted := _mistyped(setting.value, default))
        ):
            message = f"{setting.value!r} is no {wanted}, as its default {default!r} is"
            yield hurts(setting, message, f"a {wanted}")


def _mistyped(value: Any, default: Any) -> str:
    """The type that the default has and the value does not; "" where they go together."""
    if value in (None, "") or (isinstance(value, str) and "${" in value) or isinstance(value, (list, dict)):
        return ""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "boolean"
    if isinstance(default, (int, float)):
        return "number" if isinstance(value, (str, bool)) else ""
    return ""


@stock_verl_rule(
    id="verl-choices",
    asks="Does verl know each name?",
    reads="rollout.name, rollout.mode, algorithm.adv_estimator, actor.policy_loss.loss_mode, actor.loss_agg_mode",
    why="A name that is not registered ends the run.",
    source=f"{VERL_CODE}, trainer/ppo/core_algos.py, workers/rollout/base.py and workers/config/actor.py",
    gain=1.0,
)
def _choices(values: Values, subject: Subject) -> Iterator[Found]:
    yield from _unknown_choices(values, _CLOSED, must_be_known=True)
    yield from _unknown_choices(values, _OPEN, must_be_known=False)


def _unknown_choices(values: Values, choices: Mapping[str, tuple[str, ...]], *, must_be_known: bool) -> Iterator[Found]:
    for key, names in choices.items():
        setting = values.at(key)
        if not isinstance(setting.value, str) or setting.value in names or not is_known(setting.value):
            continue
        if setting.value == _MISSING:
            yield hurts(setting, "not given, and verl ends the run without it", f"one of {', '.join(names)}")
            continue
        near = difflib.get_close_matches(setting.value, names, n=1)
        if near or must_be_known:
            message = f"verl has no {setting.value}: it has {', '.join(names)}"
            yield hurts(setting, message, near[0] if near else names[0])
        else:
            yield consider(setting, f"verl itself has no {setting.value}", "register it before the trainer starts")


@stock_verl_rule(
    id="verl-group",
    asks="Does a group have more than one completion?",
    reads="rollout.n with algorithm.adv_estimator",
    why="Estimators by group take the mean of a prompt's completions as baseline.",
    source=f"{VERL_CODE}, trainer/ppo/core_algos.py",
    gain=1.0,
)
def _group(values: Values, subject: Subject) -> Iterator[Found]:
    estimator, setting = values.text("algorithm.adv_estimator"), values.at(ROLLOUT + "n")
    if values.is_true("distillation.enabled") and values.at(_TASK_REWARDS).value is False:
        return  # nothing is compared: the teacher judges each token
    if estimator in _BY_GROUP and values.whole(ROLLOUT + "n") == 1:
        message = f"{estimator} compares completions of one prompt, and there is one: its advantage is no comparison"
        yield hurts(setting, message, "8")


@verl_trainer_rule(
    id="verl-kl-twice",
    asks="Does the KL term count once?",
    reads="algorithm.use_kl_in_reward, actor.use_kl_loss",
    why="Both together hold the policy back twice, with two coefficients.",
    source=f"{VERL_CODE}, trainer/ppo/ray_trainer.py",
    gain=0.05,
)
def _kl_twice(values: Values, subject: Subject) -> Iterator[Found]:
    if values.is_true("algorithm.use_kl_in_reward") and values.is_true(ACTOR + "use_kl_loss"):
        setting = values.at("algorithm.use_kl_in_reward")
        yield consider(setting, "the KL term counts twice: in the reward and in the loss (use_kl_loss)", "False")


@verl_trainer_rule(
    id="verl-quantized-rollout",
    asks="Is the mismatch of quantized rollouts weighed?",
    reads="rollout.quantization, algorithm.rollout_correction.rollout_is",
    why="Quantized weights are another policy than the one that is trained.",
    source=f"{VERL_CODE}, trainer/config/algorithm/rollout_correction.yaml",
    gain=0.1,
)
def _quantized(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ROLLOUT + "quantization")
    correction = values.at("algorithm.rollout_correction.rollout_is")
    if isinstance(setting.value, str) and setting.value and correction.value is None:
        message = f"rollouts are drawn from {setting.value} weights, and the loss takes them for the trainer's own"
        yield consider(setting, message, "algorithm.rollout_correction.rollout_is: token")


@verl_rollout_rule(
    id="verl-penalty",
    asks="Are repetitions left unpunished?",
    reads="rollout.repetition_penalty",
    why="The loss takes completions for draws from the policy itself.",
    source=VERL_CODE,
    gain=0.1,
)
def _penalty(values: Values, subject: Subject) -> Iterator[Found]:
    setting = values.at(ROLLOUT + "repetition_penalty")
    if values.number(ROLLOUT + "repetition_penalty") not in (None, 1.0):
        message = f"{setting.value} changes the distribution that is drawn from, not the trainer's: ratios are biased"
        yield consider(setting, message, "1.0")
