"""The right content of a rollout: what the simulated engine must have made of a prompt.

Its tokens are a pure function of prompt, draw and weights. A greedy or seeded sample is computed again. A sample of an
unknown draw is checked by its log-probabilities, each a pure function of all tokens before it: a token that is lost,
doubled or of other weights changes all that follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from gateway.dialects.resumption import MARK
from sim.model import CHECKPOINT_VERSION, GREEDY, SimModel, detokenize, read, seeded_draw, weights_key
from trainer_client.results import Completion

Json = dict[str, Any]
Span = tuple[int, int | None, int | None]
"""Version, start and end."""

_FLOAT32 = 1e-5  # relative error of a log-probability in float32


@dataclass(frozen=True, slots=True)
class Asked:
    """One sample as requested. `seed` is None for a greedy one or one of an unknown draw; `floor` is the oldest version
    that it may have."""

    prompt: Sequence[int]
    tokens: int
    floor: int
    is_greedy: bool
    seed: int | None = None
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Delivered:
    """One sample as a client got it. `is_redrawn` if it is marked as continued with
    another seed."""

    token_ids: Sequence[int]
    spans: Sequence[Span]
    logprobs: Sequence[float] | None = None
    text: str | None = None
    is_redrawn: bool = False

    @classmethod
    def of_choice(cls, choice: Json) -> "Delivered":
        """Read a choice of a reply, or of a joined stream."""
        scores, message = choice.get("logprobs"), choice.get("message")
        text = choice.get("text") if message is None else message["content"]
        is_redrawn = "seed" in choice.get(MARK, ())
        return cls(
            choice.get("token_ids") or [], spans_of(choice), scores and scores["token_logprobs"], text, is_redrawn
        )

    @classmethod
    def of_completion(cls, completion: Completion) -> "Delivered":
        spans = [(span.version, span.start, span.end) for span in completion.spans]
        logprobs = None if completion.logprobs is None else completion.logprobs.tolist()
        return cls(completion.token_ids.tolist(), spans, logprobs, completion.text)


def spans_of(choice: Json) -> list[Span]:
    """Return the spans of a choice, or of a recorded call."""
    return [(int(span["version"]), span["start"], span["end"]) for span in choice.get("weight_versions") or ()]


@dataclass(frozen=True, slots=True)
class Flaw:
    """What is wrong with a sample; `is_stale` where its content is right and its weights are too old."""

    reason: str
    is_stale: bool = False


def flaw(model: SimModel, asked: Asked, got: Delivered) -> Flaw | None:
    """Return the first flaw of a delivered sample; None if it is right."""
    made_by = versions_of(len(got.token_ids), got.spans)
    if len(got.token_ids) != asked.tokens:
        return Flaw(f"{len(got.token_ids)} tokens, {asked.tokens} were requested")
    if made_by is None:
        return Flaw(f"spans {got.spans} over {len(got.token_ids)} tokens")
    if got.text is not None and got.text != detokenize(got.token_ids):
        return Flaw("its text is not that of its tokens")
    if got.logprobs is not None and len(got.logprobs) != len(got.token_ids):
        return Flaw(f"{len(got.logprobs)} log-probabilities for {len(got.token_ids)} tokens")
    if (place := _wrong_place(model, asked, got, made_by)) is not None:
        return Flaw(f"token {place} or its log-probability is not that of its prompt and versions {got.spans}")
    oldest = min(version for version, _, _ in got.spans)
    if oldest < asked.floor:
        return Flaw(f"version {oldest}, requested when the fleet was at {asked.floor}", is_stale=True)
    return None


def versions_of(tokens: int, spans: Sequence[Span]) -> list[set[int]] | None:
    """Return the versions that may have made each token; None where the spans do not fit the tokens.

    Versions without limits may have made any token that no other span has, as after a death amid an update.
    """
    made_by: list[set[int]] = [set() for _ in range(tokens)]
    for version, start, end in spans:
        if start is None or end is None:
            continue
        if end > len(made_by) or any(made_by[start:end]):
            return None
        for place in range(start, end):
            made_by[place].add(version)
    anywhere = {version for version, start, _ in spans if start is None}
    whole = [found or anywhere for found in made_by]
    return whole if all(whole) else None


def _wrong_place(model: SimModel, asked: Asked, got: Delivered, made_by: list[set[int]]) -> int | None:
    """Return the first token that none of its versions makes, or with another log-probability."""
    draw = GREEDY if asked.is_greedy else None
    if asked.seed is not None and not got.is_redrawn:
        draw = seeded_draw(asked.seed, asked.sample)
    context = read(asked.prompt)
    for place, token_id in enumerate(got.token_ids):
        keys = [weights_key(str(version) if version else CHECKPOINT_VERSION) for version in made_by[place]]
        if draw is not None:
            keys = [key for key in keys if model.next_token(context, draw, key, may_end=False) == token_id]
        if got.logprobs is not None:
            told = got.logprobs[place]
            keys = [key for key in keys if isclose(model.logprob(context, token_id, key), told, rel_tol=_FLOAT32)]
        if not keys:
            return place
        context = read((token_id,), context)
    return None
