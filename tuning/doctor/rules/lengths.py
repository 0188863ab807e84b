"""Rules about lengths: truncation, and the sequences that an engine has to hold."""

import re
from collections.abc import Iterator

from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Found, consider, fine, hurts
from tuning.doctor.model_size import context
from tuning.doctor.rules.rule import TRL_CODE, VERL_CODE, VERL_PRACTICE, engine_rule, workload_rule
from tuning.doctor.subject import Subject
from tuning.doctor.workload import Workload

_SHORT_RESPONSE = 512
# Models that reason at length before they answer.
_REASONS = re.compile(r"thinking|reason|\br1\b|qwq|gpt-oss|qwen3(?!.*instruct)", re.IGNORECASE)
_LONG_RESPONSE = 2048
_OF_GSM8K = 400  # twice what its answers have
_WATCH = "share of completions that end by length (clip ratio): above 0.1 means truncation"


@workload_rule(
    id="prompt-length",
    asks="Are prompts cut?",
    reads="data.max_prompt_length, rollout.prompt_length, data.truncation",
    why="A prompt without its beginning poses another problem than the rewarded one.",
    source=f"{VERL_CODE}, experimental/agent_loop/agent_loop.py",
)
def _prompts(workload: Workload, subject: Subject) -> Iterator[Found]:
    setting, tokens = workload.prompt, workload.prompt_tokens
    if setting is None or tokens is None:
        return
    reference = subject.against.prompt_tokens if subject.against else None
    if reference and tokens < reference:
        message = f"{tokens} tokens, where the configuration it is compared with allows {reference}"
        yield hurts(setting, f"{message}: longer prompts lose their beginning", f"{reference}")
        return
    if subject.verl and subject.verl.has_trainer:
        truncation = subject.verl.values.text("data.truncation")
        dropped = subject.verl.values.is_true("data.filter_overlong_prompts")
        if truncation != "error" and not dropped:
            message = f"prompts longer than {tokens} tokens are cut silently (data.truncation: {truncation})"
            yield consider(setting, message, "measure the data set's lengths; data.filter_overlong_prompts=True")
            return
        effect = "are left out" if dropped else "stop the run (data.truncation: error)"
        yield fine(setting, f"longer prompts {effect}")
        return
    message = f"verl's agent loop cuts prompts of more than {tokens} tokens on the left, with a line in its log alone"
    yield consider(setting, message, "measure the data set's lengths and set it above the longest")


@workload_rule(
    id="response-length",
    asks="Are responses cut?",
    reads="data.max_response_length, rollout.response_length, TRL max_completion_length",
    why="A completion cut before its answer earns no reward, so that the policy learns to be short.",
    source=f"{VERL_PRACTICE}: response clip ratio",
)
def _responses(workload: Workload, subject: Subject) -> Iterator[Found]:
    setting, tokens = workload.response, workload.response_tokens
    if setting is None or tokens is None:
        return
    reference = subject.against.response_tokens if subject.against else None
    if reference and tokens < reference:
        message = f"{tokens} tokens, where the configuration it is compared with allows {reference}"
        yield hurts(setting, f"{message}: reasoning is cut in the middle, and its answer is never seen", f"{reference}")
    elif tokens < 1:
        yield hurts(setting, f"{tokens} tokens: no completion has a token", f"{_LONG_RESPONSE} or more")
    elif _is_told_not_to_think(subject):
        yield fine(setting, f"{tokens} tokens, and chat_template_kwargs turn thinking off; watch the {_WATCH}")
    elif tokens >= _OF_GSM8K and _is_gsm8k(subject) and not _REASONS.search(subject.model):
        yield fine(setting, f"{tokens} tokens, and answers to GSM8K have about 200; watch the {_WATCH}")
    elif tokens <= _SHORT_RESPONSE:
        origin = "the default of verl and TRL" if setting.origin == "default" else "given"
        message = f"{tokens} tokens, {origin}: reasoning that takes more is cut before its answer"
        yield consider(setting, message, f"{_LONG_RESPONSE} or more for reasoning; watch the {_WATCH}")
    elif tokens < _LONG_RESPONSE and _REASONS.search(subject.model):
        yield consider(
            setting,
            f"{tokens} tokens, and the model reasons at length",
            f"{_LONG_RESPONSE} or more; watch the {_WATCH}",
        )
    else:
        yield fine(setting, f"{tokens} tokens; watch the {_WATCH}")


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


@engine_rule(
    id="max-model-len",
    asks="Does the engine hold prompt and response, and not much more?",
    reads="max_model_len, vllm_max_model_length",
    why="It is the longest sequence that the engine admits. It allocates no KV cache: that is taken by blocks as "
    "sequences grow.",
    source=f"{VERL_CODE}, vllm_async_server.py; {TRL_CODE}, TRL's prompts are checked by the engine alone",
)
def _max_model_len(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, needed, has = engine.at("max_model_len"), subject.workload.tokens, engine.number("max_model_len")
    if has is None:
        yield _ungiven(engine, subject)
    elif needed and has < needed:
        message = f"{has:.0f} tokens; prompt {subject.workload.prompt_tokens} + response "
        message += f"{subject.workload.response_tokens} take {needed}"
        yield hurts(setting, f"{message}: completions end early, longer prompts are refused", f"{needed}")
    elif needed and has > 2 * needed:
        message = f"{has:.0f} tokens, {has / needed:.1f} times what prompt and response take ({needed})"
        yield consider(setting, message, f"{needed}", "a prompt too long is refused at once, not after it ran")
    else:
        yield fine(setting, f"{has:.0f} tokens" + (f" for prompt + response of {needed}" if needed else ""))


def _ungiven(engine: EngineView, subject: Subject) -> Found:
    """The finding about an engine that takes the model's whole context."""
    setting, positions, needed = engine.at("max_model_len"), context(engine.model), subject.workload.tokens
    if needed and positions and positions < needed:
        return hurts(None, f"the model has {positions} positions, prompt and response take {needed}", "shorter lengths")
    taken = f"the model's whole context{f' of {positions:,} tokens' if positions else ''}"
    if engine.owner == "TRL" or (engine.owner == "verl" and subject.verl and subject.verl.has_trainer):
        # Both trainers bound each completion.
        return fine(setting, f"{engine.name} takes {taken}; KV cache is taken as sequences grow")
    message = f"not given: {engine.name} takes {taken}"
    message += ", and does not start where one such sequence outgrows the KV cache" if engine.is_vllm else ""
    wanted = f"{needed} (prompt {subject.workload.prompt_tokens} + response {subject.workload.response_tokens})"
    suggestion = wanted if needed else "longest prompt + longest response"
    return consider(setting, message, f"max_model_len: {suggestion}")
