"""The check of a chaos run on content finds any token, log-probability or span that is not right."""

from dataclasses import replace

import pytest

from engines.config import SimConfig
from loadtests.chaos.clients.contents import Asked, Delivered, flaw
from sim.model import SimModel, detokenize, read, seeded_draw, weights_key

MODEL = SimModel.of(SimConfig())
PROMPT, TOKENS = [5, 6, 7], 12
GREEDY = Asked(PROMPT, TOKENS, floor=0, is_greedy=True)


def delivered(boundary: int = TOKENS, seed: int | None = None) -> Delivered:
    """A right sample: version 1 up to `boundary`, version 2 after it."""
    labels = ["1" if place < boundary else "2" for place in range(TOKENS)]
    draw = 0 if seed is None else seeded_draw(seed)
    tokens = MODEL.complete(PROMPT, versions=labels, max_tokens=TOKENS, draw=draw, ignore_eos=True)
    contexts = [read([*PROMPT, *tokens[:place]]) for place in range(TOKENS)]
    keys = map(weights_key, labels)
    logprobs = [MODEL.logprob(*one) for one in zip(contexts, tokens, keys, strict=True)]
    spans = [(1, 0, boundary), (2, boundary, TOKENS)] if boundary < TOKENS else [(1, 0, TOKENS)]
    return Delivered(tokens, spans, logprobs, detokenize(tokens))


@pytest.mark.parametrize("got", [delivered(), delivered(boundary=5)])
def test_what_the_engine_makes_of_a_prompt_has_no_flaw(got: Delivered) -> None:
    assert flaw(MODEL, GREEDY, got) is None
    unlimited = [(version, None, None) for version, _, _ in got.spans]
    assert flaw(MODEL, GREEDY, replace(got, spans=unlimited)) is None


def test_a_sample_of_an_unknown_draw_is_checked_by_its_log_probabilities() -> None:
    unknown, got = replace(GREEDY, is_greedy=False), delivered(seed=3)
    assert flaw(MODEL, unknown, got) is None
    assert flaw(MODEL, replace(unknown, seed=4), got) is not None
    assert flaw(MODEL, replace(unknown, seed=4), replace(got, is_redrawn=True)) is None
    changed = [*got.token_ids[:4], got.token_ids[4] + 1, *got.token_ids[5:]]
    found = flaw(MODEL, unknown, replace(got, token_ids=changed, text=None))
    assert found is not None
    assert "token 4" in found.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [9] * TOKENS, "text": None},
        {"token_ids": delivered().token_ids[:-1], "text": None},
        {"spans": [(2, 0, TOKENS)]},
        {"spans": [(1, 0, TOKENS - 1)]},
        {"spans": [(1, 0, TOKENS + 1)]},
        {"spans": [(1, 0, 8), (1, 6, TOKENS)]},
        {"spans": []},
        {"text": "other"},
        {"logprobs": [-0.5] * TOKENS},
        {"logprobs": [-0.5]},
    ],
)
def test_anything_else_is_wrong(wrong: dict[str, object]) -> None:
    found = flaw(MODEL, GREEDY, replace(delivered(), **wrong))  # type: ignore[arg-type]  # each field by its name
    assert found is not None
    assert not found.is_stale


def test_right_tokens_of_too_old_weights_are_stale() -> None:
    found = flaw(MODEL, replace(GREEDY, floor=2), delivered())
    assert found is not None
    assert found.is_stale
