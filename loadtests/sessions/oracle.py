"""What the record of a session must be: computed from prompts, versions and the simulated model's definition alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from loadtests.chaos.clients.contents import spans_of, versions_of
from loadtests.sessions.agents import END, Answered
from sim.model import CHECKPOINT_VERSION, GREEDY, SimModel, read, weights_key

Json = dict[str, Any]

_FLOAT32 = 1e-5
_KEPT = 8


@dataclass(slots=True)
class Verdict:
    """Counts of a run. `differences` are by kind, with the first of them in `examples`."""

    sessions: int = 0
    calls: int = 0
    answers: int = 0
    tokens: int = 0
    trainable: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    roots: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def differ(self, kind: str, where: str) -> None:
        self.differences[kind] += 1
        if len(self.examples) < _KEPT:
            self.examples.append(f"{kind}: {where}")


def judge(
    model: SimModel, session_id: str, records: Sequence[Json], answered: list[Answered], verdict: Verdict
) -> None:
    """Compare the records of one session with what its agents sent and got."""
    head, *calls, end = records
    verdict.sessions += 1
    verdict.calls += len(calls)
    if head["id"] != session_id or end != {"type": "end", "calls": len(calls)}:
        verdict.differ("envelope", f"{session_id}: {head} {end}")
    prompts: list[list[int]] = []
    for place, call in enumerate(calls):
        where = f"{session_id} call {place} ({call['dialect']}, {call['mask']}, {call['root_reason']})"
        before = [] if call["parent"] is None else [*prompts[call["parent"]], *calls[call["parent"]]["token_ids"]]
        prompts.append([*before, *call["prompt_token_ids"]])
        if call["call"] != place or len(prompts[place]) != call["prompt_tokens"]:
            verdict.differ("prompt", where)
        _parent(place, calls, prompts, where, verdict)
        _tokens(model, prompts[place], call, where, verdict)
        verdict.tokens += len(call["token_ids"])
    _answers(session_id, calls, prompts, answered, verdict)


def _parent(place: int, calls: Sequence[Json], prompts: list[list[int]], where: str, verdict: Verdict) -> None:
    """The parent is the call before with the longest ids that the prompt begins with, and a root has none."""
    call, prompt, longest = calls[place], prompts[place], 0
    for other in range(place):
        tokens = calls[other]["token_ids"]
        size = len(prompts[other]) + len(tokens)
        is_longer = longest < size <= len(prompt) and tokens and calls[other]["state"] == "ended"
        if is_longer and prompt[:size] == [*prompts[other], *tokens]:
            longest = size
    given = len(prompt) - len(call["prompt_token_ids"])
    if given != longest or (call["root_reason"] is None) is (call["parent"] is None):
        verdict.differ("parent", f"{where}: {given} tokens are its parent's, {longest} could be")
    if call["parent"] is None:
        verdict.roots[str(call["root_reason"])] += 1


def _tokens(model: SimModel, prompt: list[int], call: Json, where: str, verdict: Verdict) -> None:
    """Each token and log-prob is that of its prompt and the version of its span."""
    token_ids, logprobs = call["token_ids"], call["logprobs"]
    made_by = versions_of(len(token_ids), spans_of(call))
    if made_by is None:
        verdict.differ("spans", f"{where}: {call['weight_versions']} over {len(token_ids)} tokens")
        return
    if len(logprobs) != len(token_ids):
        verdict.differ("log-probs", f"{where}: {len(logprobs)} for {len(token_ids)} tokens")
        return
    is_greedy = call["sampling"].get("temperature") == 0
    context = read(prompt)
    for place, token_id in enumerate(token_ids):
        keys = [weights_key(str(version) if version else CHECKPOINT_VERSION) for version in made_by[place]]
        told = logprobs[place]
        told_by = [key for key in keys if isclose(model.logprob(context, token_id, key), told, rel_tol=_FLOAT32)]
        if not told_by:
            verdict.differ("log-probs", f"{where}: token {place}")
            return
        if is_greedy and not any(model.next_token(context, GREEDY, key) == token_id for key in told_by):
            verdict.differ("ids", f"{where}: token {place}")
            return
        context = read((token_id,), context)


def _answers(
    session_id: str, calls: Sequence[Json], prompts: list[list[int]], answered: list[Answered], verdict: Verdict
) -> None:
    """Each answer that an agent got is recorded once, under the prompt that it sent."""
    left = Counter((tuple(prompts[place]), text_of(call)) for place, call in enumerate(calls))
    for one in answered:
        verdict.answers += 1
        name = tuple(one.prompt), one.text
        if not left[name]:
            found = any(prompt == one.prompt for prompt in prompts)
            verdict.differ("answers", f"{session_id}: {one.text[:40]!r} is not recorded (its prompt is: {found})")
        left[name] -= 1


def text_of(call: Json) -> str:
    """Return the text of a call's answer, without its end token."""
    token_ids = call["token_ids"]
    return "".join(chr(token_id - 3) for token_id in token_ids if token_id != END)
