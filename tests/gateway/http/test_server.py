"""The remaining routes of the dialect, and what every route shares."""

import asyncio
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engines.store.weight_store import WeightStore
from gateway.http.trace import Trace
from tests.rigs.rig import MAX_MODEL_LEN, Rig, StartRig


async def test_what_trl_reads_at_the_start_is_there(rig: Rig) -> None:
    assert (await rig.get("/health"))[0] == 200
    _, models = await rig.get("/v1/models")
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("sim", MAX_MODEL_LEN)
    _, info = await rig.get("/server_info", params={"config_format": "json"})
    assert info["vllm_config"]["weight_transfer_config"] is not None
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1


async def test_metrics_hold_ours_and_each_engines_with_its_name(rig: Rig) -> None:
    await rig.complete([[5], [6]], max_tokens=4, ignore_eos=True)
    async with rig.client.get(rig.url + "/metrics") as response:
        page = await response.text()
    assert 'rollout_gateway_completion_tokens_total{model="sim"} 8.0' in page
    assert 'rollout_gateway_replicas{model="sim",state="SERVING"} 2.0' in page
    for replica in ("engine-0", "engine-1"):
        assert any(
            line.startswith("vllm:generation_tokens_total") and f'replica="{replica}"' in line and line.endswith(" 4.0")
            for line in page.splitlines()
        )


async def test_the_gateways_end_writes_its_own_files_before_it_waits_for_a_store_that_hangs(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, store_answers = list[str](), threading.Event()

    def hang(_: WeightStore) -> None:
        ended.append("store")
        store_answers.wait(20)

    monkeypatch.setattr(Trace, "close", lambda _: ended.append("trace"))
    monkeypatch.setattr(WeightStore, "close", hang)
    weights = {"store": str(tmp_path), "load_timeout_s": 20.0, "control_timeout_s": 0.2}
    rig = await start_rig(1, weights=weights, gateway={"trace": {"file": str(tmp_path / "trace.jsonl")}})
    try:
        with capture_logs() as logged:
            async with asyncio.timeout(10):
                await rig.stop_gateway()
    finally:
        store_answers.set()
    assert ended == ["trace", "store"]
    assert [line["event"] for line in logged if line["log_level"] == "error"] == ["the weight store is left as it is"]
