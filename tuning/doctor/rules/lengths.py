"""Rules about lengths: truncation, and the sequences that an engine has to hold."""

import re
from collections.abc import Iterator

from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Found, consider, hurts
from tuning.doctor.model_size import context
from tuning.doctor.rules.rule import TRL_CODE, VERL_CODE, VERL_PRACTICE, Rule, of_engines, of_workload
from tuning.doctor.subject import Subject
from tuning.doctor.workload import Workload

_SHORT_RESPONSE = 512
# Models that reason at length before they answer.
_REASONS = re.compile(r"thinking|reason|\br1\b|qwq|gpt-oss|qwen3(?!.*instruct)", re.IGNORECASE)
_LONG_RESPONSE = 2048
_OF_GSM8K = 400  # twice what its answers have
_WATCH = "watch the share of completions that end by length (clip ratio): above 0.1 means truncation"


@Rule(
    of_workload, "prompt-length", "data.max_prompt_length, rollout.prompt_length, data.truncation",
    "A prompt without its beginning poses another problem than the rewarded one.",
    f"{VERL_CODE}, experimental/agent_loop/agent_loop.py",
)  # fmt: skip
def _prompts(workload: Workload, subject: Subject) -> Iterator[Found]:
    setting, tokens = workload.prompt, workload.prompt_tokens
    if setting is None or tokens is None:
        return
    reference = subject.against.prompt_tokens if subject.against else None
    if reference and tokens < reference:
        message = f"{tokens} tokens, where the configuration it is compared with allows {reference}"
        yield hurts(setting, f"{message}: longer prompts lose their beginning", f"{reference}")
    elif not subject.verl or not subject.verl.has_trainer:
        message = f"verl's agent loop cuts prompts of more than {tokens} tokens on the left, with a line in its log"
        yield consider(setting, message, "measure the data set's lengths and set it above the longest")
    else:
        truncation = subject.verl.values.text("data.truncation")
        if truncation != "error" and not subject.verl.values.is_true("data.filter_overlong_prompts"):
            message = f"prompts longer than {tokens} tokens are cut silently (data.truncation: {truncation})"
            yield consider(setting, message, "measure the data set's lengths; data.filter_overlong_prompts=True")


@Rule(
    of_workload, "response-length", "data.max_response_length, rollout.response_length, TRL max_completion_length",
    "A completion cut before its answer earns no reward, so that the policy learns to be short.",
    f"{VERL_PRACTICE}: response clip ratio",
)  # fmt: skip
def _responses(workload: Workload, subject: Subject) -> Iterator[Found]:
    setting, tokens = workload.response, workload.response_tokens
    if setting is None or tokens is None:
        return
    reference, reasons = subject.against.response_tokens if subject.against else None, _REASONS.search(subject.model)
    if reference and tokens < reference:
        message = f"{tokens} tokens, where the configuration it is compared with allows {reference}"
        yield hurts(setting, f"{message}: reasoning is cut in the middle, and its answer is never seen", f"{reference}")
    elif tokens < 1:
        yield hurts(setting, f"{tokens} tokens: no completion has a token", f"{_LONG_RESPONSE} or more")
    elif _is_told_not_to_think(subject) or (tokens >= _OF_GSM8K and _is_gsm8k(subject) and not reasons):
        return
    elif tokens <= _SHORT_RESPONSE:
        origin = "the default of verl and TRL" if setting.origin == "default" else "given"
        message = f"{tokens} tokens, {origin}: reasoning that takes more is cut before its answer"
        yield consider(setting, message, f"{_LONG_RESPONSE} or more for reasoning; {_WATCH}")
    elif tokens < _LONG_RESPONSE and reasons:
        message = f"{tokens} tokens, and the model reasons at length"
        yield consider(setting, message, f"{_LONG_RESPONSE} or more; {_WATCH}")


def _is_told_not_to_think(subject: Subject) -> bool:
    kwargs = subject.trl.values.at("chat_template_kwargs").value if subject.trl else None
    return isinstance(kwargs, dict) and kwargs.get("enable_thinking") is False


def _is_gsm8k(subject: Subject) -> bool:
    """True if all data that the file gives is GSM8K's."""
    files = subject.verl.values.at("data.train_files") if subject.verl else None
    if files is None or files.origin == "default":
        return False
    names = re.findall(r"[^\s,'\"\[\]]+", str(files.value))
    return bool(names) and all("gsm8k" in name.lower() for name in names)


@Rule(
    of_engines, "max-model-len", "max_model_len, vllm_max_model_length",
    "It is the longest sequence that the engine admits. It allocates no KV cache: that is taken by blocks as sequences "
    "grow.",
    f"{VERL_CODE}, vllm_async_server.py; {TRL_CODE}, TRL's prompts are checked by the engine alone",
)  # fmt: skip
def _max_model_len(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, needed, has = engine.at("max_model_len"), subject.workload.tokens, engine.number("max_model_len")
    lengths = f"prompt {subject.workload.prompt_tokens} + response {subject.workload.response_tokens}"
    if has is None:
        yield from _ungiven(engine, subject, lengths)
    elif needed and has < needed:
        message = f"{has:.0f} tokens; {lengths} take {needed}: completions end early, longer prompts are refused"
        yield hurts(setting, message, f"{needed}")
    elif needed and has > 2 * needed:
        message = f"{has:.0f} tokens, {has / needed:.1f} times what prompt and response take ({needed})"
        yield consider(setting, message, f"{needed}", "a prompt too long is refused at once, not after it ran")


def _ungiven(engine: EngineView, subject: Subject, lengths: str) -> Iterator[Found]:
    """The finding about an engine that takes the model's whole context."""
    positions, needed = context(engine.model), subject.workload.tokens
    if needed and positions and positions < needed:
        yield hurts(None, f"the model has {positions} positions, prompt and response take {needed}", "shorter lengths")
    elif engine.owner != "TRL" and not (engine.owner == "verl" and subject.verl and subject.verl.has_trainer):
        # Both trainers bound each completion.
        taken = f"the model's whole context{f' of {positions:,} tokens' if positions else ''}"
        message = f"not given: {engine.name} takes {taken}"
        message += ", and does not start where one such sequence outgrows the KV cache" if engine.is_vllm else ""
        wanted = f"{needed} ({lengths})" if needed else "longest prompt + longest response"
        yield consider(engine.at("max_model_len"), message, f"max_model_len: {wanted}")
