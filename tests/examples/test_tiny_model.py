"""The digit-sorting task, the committed model and the script that makes it."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import task

MAX_MODEL_BYTES = 6_000_000


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def train(transformers: Any) -> Any:
    """The script, which loads transformers."""
    from examples.tiny_model import train

    return train


@pytest.fixture(scope="module")
def tokenizer(transformers: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(task.COMMITTED)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_only_the_sorted_digits_earn_the_reward() -> None:
    answers = ["01237", "0123", "01237 ", "10237", ""]
    rewards = task.exact_answer([task.prompt("70312")] * 5, [said(text) for text in answers])
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_committed_model_is_small_and_float32_with_an_untied_head(transformers: Any) -> None:
    from safetensors.torch import load_file

    config = transformers.AutoConfig.from_pretrained(task.COMMITTED)
    weights = load_file(task.COMMITTED / "model.safetensors")
    assert sum(file.stat().st_size for file in task.COMMITTED.iterdir()) < MAX_MODEL_BYTES
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    assert not config.tie_word_embeddings
    assert "lm_head.weight" in weights
    assert config.head_dim == 64


def test_a_prompt_is_one_token_a_character_between_its_marks(tokenizer: Any) -> None:
    ids = task.prompt_token_ids(tokenizer, "703")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "7", "0", "3", "<|assistant|>"]


def test_the_committed_tokenizer_is_the_one_that_the_script_makes(train: Any, tmp_path: Path) -> None:
    train.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (task.COMMITTED / name).read_text()


def test_the_committed_model_mostly_knows_the_answer(tokenizer: Any) -> None:
    asked = list(islice(task.problems(seed=5), 32))
    answers = [
        tokenizer.decode(ids, skip_special_tokens=True) for ids in task.greedy_token_ids(str(task.COMMITTED), asked)
    ]
    assert sum(answer == task.answer(problem) for answer, problem in zip(answers, asked, strict=True)) >= 22


@pytest.mark.slow
def test_the_script_makes_the_committed_model_again(train: Any, tmp_path: Path) -> None:
    train.train(tmp_path)
    assert train.largest_difference(tmp_path, task.COMMITTED) <= train.TOLERANCE
