"""The witness of a chaos run believes nothing: what a fleet must not do is counted, and what it may do is not."""

from typing import Any

import pytest

from engines.config import SimConfig
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.clients.witness import Witness
from loadtests.chaos.faults import Newest
from sim.model import CHECKPOINT_VERSION, SimModel, read, seeded_draw, weights_key

SEED = 7
SIM = SimConfig()
Json = dict[str, Any]


@pytest.fixture
def witness() -> Witness:
    return Witness("http://127.0.0.1:1", SIM, Newest(), num_clients=1, bound_s=1)


def answer() -> list[Json]:
    """The answer of a fleet to batch SEED."""
    model = SimModel.of(SIM)
    choices = []
    for index in range(8):
        prompt, draw = [3 + SEED, 3, 3 + index // 2], seeded_draw(SEED, index % 2)
        tokens = model.complete(prompt, versions=CHECKPOINT_VERSION, max_tokens=40, draw=draw, ignore_eos=True)
        contexts = [read([*prompt, *tokens[:place]]) for place in range(40)]
        logprobs = [model.logprob(*one, weights_key(CHECKPOINT_VERSION)) for one in zip(contexts, tokens, strict=True)]
        spans = [{"version": 0, "start": 0, "end": 40}]
        choices.append(
            {"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "weight_versions": spans}
        )
    return choices


def test_a_choice_marked_as_continued_with_another_seed_is_judged_by_its_log_probabilities(witness: Witness) -> None:
    choices = answer()
    for choice, other in zip(choices[::2], choices[1::2], strict=True):
        choice |= {key: other[key] for key in ("token_ids", "logprobs")} | {"resumed": ["seed"]}
    assert tallied(witness, choices).wrong == 0
    del choices[0]["resumed"]
    assert tallied(witness, choices).wrong == 1


def tallied(witness: Witness, choices: list[Json]) -> Tally:
    witness._answered(witness._numbered(SEED)[0], choices)
    return witness.record.tally


def test_versions_without_limits_hold_for_any_token(witness: Witness) -> None:
    choices = answer()
    choices[0]["weight_versions"] = [{"version": version, "start": None, "end": None} for version in (0, 1)]
    choices[1]["weight_versions"] = [{"version": version, "start": None, "end": None} for version in (1, 2)]
    assert tallied(witness, choices).wrong == 1


def test_a_place_told_twice_is_a_duplicate_and_one_never_told_is_not_delivered(witness: Witness) -> None:
    choices = answer()
    choices[5] = choices[4]
    tally = tallied(witness, choices)
    assert (tally.delivered, tally.duplicated) == (7, 1)
