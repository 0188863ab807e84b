"""Speculative decoding in a real vLLM server on CPU: tokens stay the target's over updates that leave the draft."""

from pathlib import Path
from shutil import copytree

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

from examples.tiny_model import task
from gateway.fleet.watch.engine_page import read_total
from tests.material import tied_model
from tests.rigs.engines.real_trainer import PROBLEMS, said_at, trl_client
from tests.rigs.engines.real_vllm import on_engine, served

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_tokens_are_the_targets_after_an_update_beside_speculation(method: str, tmp_path: Path) -> None:
    tied_model.save(tmp_path / "first", seed=1)
    second = tied_model.save(tmp_path / "second", seed=2)
    first_says, second_says = (task.greedy_token_ids(str(tmp_path / name), PROBLEMS) for name in ("first", "second"))
    assert first_says != second_says
    copytree(tmp_path / "first", tmp_path / "draft")
    draft = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    speculation = NGRAM if method == "ngram" else draft

    with served(tmp_path / "first", tmp_path, extra={"speculative_config": speculation}) as url:

        def counted() -> tuple[float, float]:
            page = on_engine(url, lambda engine: engine.metrics(TIMEOUT_S))
            return read_total(page, DRAFTED) or 0.0, read_total(page, ACCEPTED) or 0.0

        assert said_at(url) == first_says
        drafted, accepted = counted()
        with trl_client(url) as client:
            on_engine(url, lambda engine: engine.open_receipt(None, TIMEOUT_S))
            client.update_model_params(second)
            on_engine(url, lambda engine: engine.close_receipt(TIMEOUT_S))
        assert said_at(url) == second_says
        later = counted()
        described = on_engine(url, lambda engine: engine.prepare_updates((), "", (), TIMEOUT_S)).draft
        assert described.startswith("ngram, without weights" if method == "ngram" else "draft_model, frozen: ")
        if method == "draft_model":
            assert accepted > 0.9 * drafted > 0  # of the target's own weights
            assert later[1] - accepted < 0.5 * (later[0] - drafted)
