"""Loads of weights under a model that reads images, in a real vLLM server on CPU."""

import base64
import io
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from PIL import Image

from engines.clients.vllm_engine import VllmEngine
from tests.material import image_model
from tests.rigs.engines.real_vllm import on_engine, served

pytestmark = pytest.mark.vllm

TIMEOUT_S = 120.0


def says(url: str, model: Path, red: int) -> list[int]:
    """What the model says of a picture."""
    file = io.BytesIO()
    picture = Image.effect_mandelbrot((28, 28), (-2.0, -1.5, 1.0, 1.5), 20).convert("RGB")
    Image.merge("RGB", (picture.split()[0].point(lambda value: value ^ red), *picture.split()[1:])).save(file, "PNG")
    image = {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "12+34="}]
    body = {
        "model": str(model), "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    reply = on_engine(url, lambda engine: engine.generate("/v1/chat/completions", body, TIMEOUT_S))
    token_ids: list[int] = reply["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize("has_worker", [True, False])
def test_an_image_that_was_seen_before_a_load_ends_no_engine_and_is_seen_anew(tmp_path: Path, has_worker: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    image_model.save(first, seed=1)
    image_model.save(second, seed=2)
    with served(first, tmp_path) as url:
        before = says(url, first, 0)
        assert before != says(url, first, 200)
        on_engine(url, lambda engine: load(engine, second, has_worker))
        says(url, first, 0)  # its encoding may be of the weights before, which ends no engine
        on_engine(url, forget)
        after = says(url, first, 0)
        assert after != before
        on_engine(url, lambda engine: load(engine, first, has_worker))
        on_engine(url, forget)
        assert says(url, first, 0) == before


async def forget(engine: VllmEngine) -> None:
    assert await engine.reset_prefix_cache(TIMEOUT_S)
    await engine.wipe_kv(TIMEOUT_S)


async def load(engine: VllmEngine, folder: Path, has_worker: bool) -> None:
    """Load a checkpoint by our worker, or by vLLM alone."""
    engine._has_tee = has_worker
    await engine.load_snapshot(str(folder), 1, TIMEOUT_S)
