"""Images in a session on vLLM (CPU): the prompt has their places as the engine wrote them, the record their bytes."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from PIL import Image

from tests.material import image_model
from tests.rigs.engines.real_vllm import fleet
from tests.rigs.sessions import record_at

pytestmark = pytest.mark.vllm

Json = dict[str, Any]


def png(color: int) -> bytes:
    Image.effect_mandelbrot((28, 28), (-2.0, -1.5, 1.0, 1.5), color).convert("RGB").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_a_turn_with_an_image_is_token_exact_and_its_file_is_in_the_record_once(tmp_path: Path) -> None:
    model, images = tmp_path / "model", [png(20), png(90)]
    image_model.save(model, seed=1)
    with fleet(model, tmp_path, 1) as real:
        for picture in (images[0], images[0], images[1]):
            url = {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}
            content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "12+34="}]
            body = {"model": str(model), "max_tokens": 6, "temperature": 0.0}
            body["messages"] = [{"role": "user", "content": content}]
            status, reply = real.call("/sessions/seen/v1/chat/completions", body)
            assert status == 200, reply
        _, calls = asyncio.run(record_at(real.url, "seen"))
    assert [(call["mask"], call["retry_of"], len(call["logprobs"])) for call in calls] == [(None, None, 6)] * 3
    first, second, third = calls
    assert first["prompt_token_ids"] == second["prompt_token_ids"] == third["prompt_token_ids"]
    assert first["token_ids"] == second["token_ids"] != third["token_ids"]
    assert first["logprobs"] == pytest.approx(second["logprobs"], abs=1e-4)
    told = [{"media_type": "image/png", "data": one} for one in images]
    assert first["media"] == [{"id": first["media"][0]["id"], **told[0]}]
    assert second["media"] == [{"id": first["media"][0]["id"]}]
    assert third["media"] == [{"id": third["media"][0]["id"], **told[1]}]
