"""GRPOTrainer of TRL 1.10 against two real vLLM replicas: the recipe of docs/trl.md, with that TRL before ours.

    pip download --no-deps trl==1.10.0 && unzip -d TRL trl-1.10.0-*.whl
    TRL_LEGACY=TRL python -m pytest -m slow tests/trainer_client/test_trl_legacy.py

Its own client's requests are tested in tests/gateway/http/routes/test_trl_legacy.py and test_real_trl_legacy.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from engines.errors import WeightUpdateFailed
from examples.tiny_model import task
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import app, engine_config, greedy_token_ids
from tests.running.client_records import runs_client
from tests.trainer_client.rloo_ratio import RATIO
from tests.trainer_client.test_real_trl import AGAINST, ROOT, STEPS, Record, record_ratio, run_recipe, versions
from trainer_client import WeightSender
from trainer_client.trl_legacy import LegacyVLLMClient

LEGACY = os.environ.get("TRL_LEGACY", "")
PROBLEMS = task.some_problems(8)
# The last sync is the one before the last step.
_LAST_SYNC = """
trainer.vllm_generation.sync_weights()
trainer.save_model("last")
"""


@pytest.mark.vllm
def test_the_retry_of_a_failed_sync_sends_its_tensors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, float]] = []

    def push(named: Iterator[tuple[str, torch.Tensor]]) -> int:
        sent.append({name: tensor.item() for name, tensor in named})
        if len(sent) == 1:
            raise WeightUpdateFailed("replica engine-0 died")
        return 3

    monkeypatch.setattr(VLLMClient, "__init__", lambda _: None)
    monkeypatch.setattr(VLLMClient, "reset_prefix_cache", lambda _: None)
    client = LegacyVLLMClient()
    client._sender = cast(WeightSender, SimpleNamespace(push=push))
    client.update_named_param("w", torch.tensor(2.0))
    with pytest.raises(WeightUpdateFailed):
        client.reset_prefix_cache()
    for _ in range(2):
        client.reset_prefix_cache()
    assert (sent, client.weight_version) == ([{"w": 2.0}] * 2, 3)


@pytest.mark.slow
@pytest.mark.skipif(not LEGACY, reason="TRL_LEGACY names no folder with TRL 1.10.0")
@runs_client("TRL GRPOTrainer, legacy", "trl==1.10.0", ran="docs/trl.md: weights through the store", against=AGAINST)
def test_grpo_of_trl_1_10_syncs_before_every_step(tmp_path: Path, record_property: Record) -> None:
    levers = {"num_replicas": 2, "served_model_name": str(COMMITTED.relative_to(ROOT))}
    engine = engine_config(COMMITTED, tmp_path).model_copy(update=levers)
    with app({"engine": engine}, gateway={"port": 0, "trl_legacy": True}) as fleet:
        steps = run_recipe("TRL 1.10 and older", fleet.url, tmp_path, before=[LEGACY], epilogue=_LAST_SYNC)
        assert len(steps) == STEPS
        assert versions(fleet) == [STEPS + 1, STEPS + 1]
        record_ratio(record_property, [step[f"{RATIO}/mean"] for step in steps])
        trained = str(tmp_path / "last")
        tokenizer = AutoTokenizer.from_pretrained(trained)
        prompts = [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS]
        expected = task.greedy_token_ids(trained, PROBLEMS)
        for replica in fleet.replicas:
            assert greedy_token_ids(replica.url, prompts, task.MAX_ANSWER_TOKENS) == expected
    record_property("fact", f"{STEPS} steps, {STEPS + 1} versions, greedy tokens are transformers' own")
