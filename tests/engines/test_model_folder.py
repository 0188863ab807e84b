"""Where a model's files lie: a folder, or the Hugging Face cache."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.model_folder import check_fetchable, model_folder
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


ANSWERS = {"here": (200, ""), "mistral": (404, "EntryNotFound"), "gone": (404, "RepoNotFound"), "gated": (403, "")}


class Hub(BaseHTTPRequestHandler):
    """The hub's answers about a model's config.json, by the owner in the model's id."""

    def do_HEAD(self) -> None:
        status, code = ANSWERS[self.path.split("/")[1]]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("model", ["here/model", "mistral/model", "org/model:Q4_K_M", "s3://bucket/model"])
def test_a_model_that_the_hub_has_or_only_the_engine_knows_passes(hub: str, tmp_path: Path, model: str) -> None:
    check_fetchable(engine(model=model, env={"HF_ENDPOINT": hub, "HF_HUB_CACHE": str(tmp_path)}))


@pytest.mark.parametrize("model", ["gone/model", "gated/model"])
def test_a_model_that_the_hub_does_not_give_is_refused(hub: str, tmp_path: Path, model: str) -> None:
    env = {"HF_ENDPOINT": hub, "HF_HUB_CACHE": str(tmp_path)}
    with pytest.raises(
        ConfigError, match=f"engine.model = '{model}' is not in .* cache, and the hub does not give it: 40"
    ):
        check_fetchable(engine(model=model, env=env))
    check_fetchable(engine(model=model, env={**env, "HF_TOKEN_PATH": "/a/token/of/the/engines"}))


def test_without_a_hub_a_model_has_to_be_a_folder_or_in_the_cache(files: Path, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"the hub does not give it: .*; correct it, download the model first"):
        check_fetchable(engine(env=env))
    check_fetchable(engine(model=str(files), env=env))
    cached(files, tmp_path, MODEL)
    check_fetchable(engine(env=env))
