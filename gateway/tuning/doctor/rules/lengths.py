"""Rules about lengths: truncation, and the sequences that an engine has to hold."""

from collections.abc import Iterator

from gateway.tuning.doctor.engine_view import EngineView
from gateway.tuning.doctor.finding import Found, consider, fine, hurts
from gateway.tuning.doctor.model_size import context
from gateway.tuning.doctor.rules.rule import TRL_CODE, VERL_CODE, VERL_PRACTICE, engine_rule, workload_rule
from gateway.tuning.doctor.subject import Subject
from gateway.tuning.doctor.workload import Workload

_SHORT_RESPONSE = 512
_LONG_RESPONSE = 2048
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
    elif tokens <= _SHORT_RESPONSE:
        origin = "the default of verl and TRL" if setting.origin == "default" else "given"
        message = f"{tokens} tokens, {origin}: reasoning that takes more is cut before its answer"
        yield consider(setting, message, f"{_LONG_RESPONSE} or more for reasoning; watch the {_WATCH}")
    elif tokens < _LONG_RESPONSE:
        yield consider(setting, f"{tokens} tokens may cut longer reasoning", f"watch the {_WATCH}")
    else:
        yield fine(setting, f"{tokens} tokens; watch the {_WATCH}")


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
        yield _ungiven(engine, subject.workload)
    elif needed and has < needed:
        message = f"{has:.0f} tokens; prompt {subject.workload.prompt_tokens} + response "
        message += f"{subject.workload.response_tokens} take {needed}"
        yield hurts(setting, f"{message}: completions end early, longer prompts are refused", f"{needed}")
    elif needed and has > 2 * needed:
        message = f"{has:.0f} tokens, {has / needed:.1f} times what prompt and response take ({needed})"
        yield consider(setting, message, f"{needed}", "a prompt too long is refused at once, not after it ran")
    else:
        yield fine(setting, f"{has:.0f} tokens" + (f" for prompt + response of {needed}" if needed else ""))


def _ungiven(engine: EngineView, workload: Workload) -> Found:
    """The finding about an engine that takes the model's whole context."""
    positions, needed = context(engine.model), workload.tokens
    if needed and positions and positions < needed:
        return hurts(None, f"the model has {positions} positions, prompt and response take {needed}", "shorter lengths")
    taken = f"the model's whole context{f' of {positions:,} tokens' if positions else ''}"
    message = f"not given: {engine.name} takes {taken}"
    message += ", and does not start where one such sequence outgrows the KV cache" if engine.is_vllm else ""
    wanted = f"{needed} (prompt {workload.prompt_tokens} + response {workload.response_tokens})"
    suggestion = wanted if needed else "longest prompt + longest response"
    return consider(engine.at("max_model_len"), message, f"max_model_len: {suggestion}")
