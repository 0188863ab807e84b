"""Model folders for engines with random weights."""

import json
from pathlib import Path

import pytest

from loadtests.shapes import SHAPES, tokenizer, write_model


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tokenizer_knows_every_id_that_random_weights_sample(shape: str, tmp_path: Path) -> None:
    write_model(shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))


def test_it_has_a_letter_for_each_byte() -> None:
    assert all(len(token) == 1 for token in list(tokenizer(1000)["model"]["vocab"])[:256])
