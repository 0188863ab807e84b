"""The made-up model is a pure function, and behaves like a language model where clients can notice."""

from itertools import pairwise

from engines.config import SimConfig
from sim.model import EOS_TOKEN, SimModel, detokenize, read, seeded_draw, tokenize, weights_key

MODEL = SimModel.of(SimConfig())
PROMPT = [5, 6, 7]


def test_another_version_writes_another_completion() -> None:
    first, again, other = (MODEL.complete(PROMPT, versions=v, ignore_eos=True) for v in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_a_completion_cut_short_goes_on_as_if_it_had_not_been() -> None:
    draw = seeded_draw(11)
    whole = MODEL.complete(PROMPT, draw=draw, max_tokens=20, ignore_eos=True)
    rest = MODEL.complete(PROMPT + whole[:8], draw=draw, max_tokens=12, ignore_eos=True)
    assert whole[8:] == rest


def test_lengths_average_mean_tokens() -> None:
    lengths = [len(MODEL.complete([i], draw=seeded_draw(i), max_tokens=10_000)) for i in range(1500)]
    assert 0.9 < sum(lengths) / len(lengths) / MODEL.mean_tokens < 1.1


def test_logprobs_are_negative_and_highest_for_the_greedy_token() -> None:
    context, weights = read(PROMPT), weights_key("1")
    likely = MODEL.likely(context, 50, weights)
    assert next(iter(likely)) == MODEL.complete(PROMPT, versions="1", max_tokens=1)[0]
    assert len(likely) == 50
    assert all(0 > better >= worse for better, worse in pairwise(likely.values()))
    assert MODEL.rank(max(likely.values())) == 1 < MODEL.rank(min(likely.values())) <= MODEL.vocab_size


def test_text_survives_the_tokenizer() -> None:
    text = "Sort 3 1 2:\n\té 漢 🙂"
    assert detokenize(tokenize(text)) == text
    assert detokenize([0, 1, EOS_TOKEN]) == ""
