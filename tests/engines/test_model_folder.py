"""Where a model's files lie: a folder, or the Hugging Face cache."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.model_folder import model_folder
from tests.material.hub_cache import cached

MODEL = "acme/digit-sort"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "max_position_embeddings": 512}))
    (folder / "model.safetensors").write_bytes(b"tensors")
    return folder


def engine(**given: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": MODEL, **given})


def test_a_folder_is_where_it_is(files: Path) -> None:
    assert model_folder(engine(model=str(files))) == files


@pytest.mark.parametrize("key", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "download_dir"])
def test_an_id_is_found_in_the_cache_that_the_engine_uses(files: Path, tmp_path: Path, key: str) -> None:
    cache = tmp_path / "cache" / ("hub" if key == "HF_HOME" else "")
    snapshot = cached(files, cache, MODEL)
    where = {key: str(tmp_path / "cache")}
    given: dict[str, Any] = {"extra": where} if key == "download_dir" else {"env": where}
    assert model_folder(engine(**given)) == snapshot


def test_of_several_revisions_the_one_that_is_served_is_taken(files: Path, tmp_path: Path) -> None:
    cached(files, tmp_path / "cache", MODEL)
    other = cached(files, tmp_path / "cache", MODEL, revision="v2", commit="b" * 40)
    extra = {"revision": "v2", "download_dir": str(tmp_path / "cache")}
    assert model_folder(engine(extra=extra)) == other


def test_what_is_not_whole_is_not_there(files: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (files / "model.safetensors").rename(files / "model-1.safetensors")
    (files / "model.safetensors.index.json").write_text(json.dumps(index))
    snapshot = cached(files, tmp_path / "cache", MODEL)
    extra = {"download_dir": str(tmp_path / "cache")}
    assert model_folder(engine(extra=extra)) is None
    (snapshot / "model-2.safetensors").write_bytes(b"more")
    assert model_folder(engine(extra=extra)) == snapshot


@pytest.mark.parametrize("model", ["acme/other", "/no/such/folder", "../folder", ""])
def test_what_is_nowhere_is_left_to_the_engine(tmp_path: Path, model: str) -> None:
    assert model_folder(engine(model=model, extra={"download_dir": str(tmp_path)})) is None
