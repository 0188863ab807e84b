"""GRPOTrainer of TRL 1.10 against two real vLLM replicas: the recipe of docs/trl.md, with that TRL before ours.

    pip download --no-deps trl==1.10.0 && unzip -d TRL trl-1.10.0-*.whl
    TRL_LEGACY=TRL python -m pytest -m slow tests/trainer_client/test_trl_legacy.py

Its own client's requests are tested in tests/gateway/http/routes/test_trl_legacy.py and test_real_trl_legacy.py.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from transformers import AutoTokenizer

from examples.tiny_model import task
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import app, engine_config, greedy_token_ids
from tests.running.client_records import runs_client
from tests.trainer_client.rloo_ratio import RATIO
from tests.trainer_client.test_real_trl import AGAINST, ROOT, STEPS, Record, record_ratio, run_recipe, versions

pytestmark = pytest.mark.slow

LEGACY = os.environ.get("TRL_LEGACY", "")
PROBLEMS = task.some_problems(8)
# The last sync is the one before the last step.
_LAST_SYNC = """
trainer.vllm_generation.sync_weights()
trainer.save_model("last")
"""


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
