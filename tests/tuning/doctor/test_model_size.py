"""How large a model is, by its files or its name."""

from pathlib import Path

import pytest

from examples.tiny_model import task
from tests.material.hub_cache import cached
from tuning.doctor.model_size import context, weight_gib


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_folder_and_an_id_in_the_cache_tell_the_same(cache: Path) -> None:
    cached(task.COMMITTED, cache, "acme/sorter-7B")
    for ask in (weight_gib, context):
        assert ask("acme/sorter-7B") == ask(str(task.COMMITTED))
    size = sum(file.stat().st_size for file in task.COMMITTED.glob("*.safetensors"))
    assert weight_gib("acme/sorter-7B") == size / 2**30


@pytest.mark.parametrize(
    ("model", "gib"), [("Qwen/Qwen2-7B", 7e9), ("/models/tiny-135M/", 135e6), ("acme/unnamed", None), ("", None)]
)
def test_a_name_tells_where_there_are_no_files(cache: Path, model: str, gib: float | None) -> None:
    assert weight_gib(model) == (gib and gib * 2 / 2**30)
    assert context(model) is None


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 7e9 * 0.57),
        ("neuralmagic/Llama-70B-FP8", 70e9 * 1.05),
        ("openai/gpt-oss-120b", 120e9 * 0.57),
        ("lmsys/gpt-oss-20b-bf16", 20e9 * 2),
    ],
)
def test_a_quantized_model_is_smaller_by_its_name(cache: Path, model: str, gib: float) -> None:
    assert weight_gib(model) == pytest.approx(gib / 2**30)
