"""The doctor at a running gateway: real HTTP, simulated engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.samples import Sample

from engines.errors import ConfigError, GatewayUnreachable
from tests.rigs.rig import Rig, StartRig
from tuning.doctor.finding import Finding, Severity
from tuning.doctor.live import Live, look, watch
from tuning.doctor.rules.all import SECTIONS, examine
from tuning.doctor.subject import subject_of

HURTS, CONSIDER = Severity.HURTS, Severity.CONSIDER


async def examined(rig: Rig) -> dict[str, list[Finding]]:
    live = await asyncio.to_thread(look, rig.url)
    found: dict[str, list[Finding]] = {}
    for one in examine(subject_of(live=live)):
        found.setdefault(one.rule, []).append(one)
    return found


def of(live: Live, rule: str) -> list[Finding]:
    return [one for one in examine(subject_of(live=live)) if one.rule == rule]


def page(*samples: tuple[str, dict[str, str], float], **status: Any) -> Live:
    base = {"replicas_refused": {}, "replicas_expected": 0, "replicas": [], "queue_length": 0, "gate_closed_for": ""}
    return Live("http://g", base | status, tuple(Sample(*sample) for sample in samples), None)


def replica(name: str, model: str = "m", state: str = "SERVING", label: str = "") -> dict[str, Any]:
    about = {
        "replica_id": name,
        "label": label or name,
        "model": model,
        "state": state,
        "reason": "",
        "weight_version": 0,
    }
    return about | {"kind": "vllm", "frozen": False}


async def test_a_fleet_at_rest_has_nothing_to_complain_of(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    for _ in range(3):
        await rig.complete([list(range(5, 85))] * 8, max_tokens=2)
    assert not (await examined(rig)).keys() - {"live-clipped"}


async def test_completions_that_end_by_length_are_told_with_their_share(start_rig: StartRig) -> None:
    rig = await start_rig(sim={"mean_tokens": 10_000})
    await rig.complete([[5, 6, 7]] * 8, n=4, max_tokens=4)
    (clipped,) = (await examined(rig))["live-clipped"]
    assert clipped.severity is HURTS
    assert clipped.value > 0.9
    assert "32 completions" in clipped.message


async def test_a_kv_cache_that_is_too_small_shows_in_capacity_and_preemptions(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1, sim={"kv_tokens": 100, "mean_tokens": 10_000, "decode_step_s": 0.003})
    await rig.complete([[5, 6, 7, 8]] * 8, max_tokens=40)
    found = await examined(rig)
    (capacity,) = found["live-kv-capacity"]
    assert (capacity.severity, capacity.value) == (HURTS, 100)
    assert "0.8 sequences of 128 tokens" in capacity.message
    (preempted,) = found["live-preemptions"]
    assert preempted.severity is HURTS
    assert preempted.value > 0


def test_a_trainer_that_waits_for_the_copy_of_the_version_before_is_shown_huge_pages() -> None:
    def cost(store_s: float) -> list[Finding]:
        return of(page(last_weight_update={"seconds": {"store": store_s, "transfer": 0.05}}), "live-update-cost")

    assert [one.severity for one in cost(1.3)] == [CONSIDER]
    assert "huge pages" in cost(1.3)[0].suggestion
    assert cost(0.3) == []


def test_prefixes_that_are_read_again_are_told() -> None:
    def hits(count: float) -> list[Finding]:
        figures = {"vllm:prefix_cache_queries_total": 2000.0, "vllm:prefix_cache_hits_total": count}
        return of(page(*((name, {"replica": "a"}, value) for name, value in figures.items())), "live-prefix-hits")

    assert [(one.severity, one.value) for one in hits(20)] == [(CONSIDER, 0.01)]
    assert hits(1000) == []


async def test_a_replica_that_is_gone_hurts(rig: Rig) -> None:
    await rig.replicas[1].kill()
    async with asyncio.timeout(30):
        while (await rig.states()).get("engine-1") == "SERVING":
            await asyncio.sleep(0.02)
    told = (await examined(rig))["live-replicas"]
    assert [one.severity for one in told if one.key != "replicas_lost.engine"] == [HURTS]
    assert told[0].place == f"{rig.url}/status"


def test_waiting_beside_an_empty_cache_is_the_limit_of_sequences() -> None:
    def waiting(usage: float) -> Live:
        labels = {"replica": "a"}
        gauges = {"num_requests_waiting": 7.0, "num_requests_running": 8.0, "kv_cache_usage_perc": usage}
        return page(*((f"vllm:{name}", labels, value) for name, value in gauges.items()))

    (low,), (full,) = of(waiting(0.1), "live-waiting"), of(waiting(0.95), "live-waiting")
    assert (low.severity, low.value) == (HURTS, 7)
    assert "max_num_seqs" in low.suggestion
    assert full.severity is CONSIDER


def test_sglangs_figures_count_as_vllms() -> None:
    live = page(("sglang:num_queue_reqs", {"replica": "a"}, 3.0), ("sglang:token_usage", {"replica": "a"}, 0.1))
    (found,) = of(live, "live-waiting")
    assert (found.severity, found.value) == (HURTS, 3)


def test_one_replica_that_does_the_work_of_its_model_alone_hurts() -> None:
    def made(*tokens: float) -> list[Finding]:
        names = [f"r{index}" for index in range(len(tokens))]
        samples = (
            ("vllm:generation_tokens_total", {"replica": name}, n) for name, n in zip(names, tokens, strict=True)
        )
        return of(page(*samples, replicas=[replica(f"engine-{name}", label=name) for name in names]), "live-imbalance")

    assert [one.severity for one in made(9000, 1000, 1000)] == [HURTS]
    assert [one.severity for one in made(2600, 2000, 1600)] == [CONSIDER]
    assert made(2000, 2100) == made(5, 0) == []


def test_an_engine_without_statistics_a_queue_and_refusals_are_told() -> None:
    missing = [{"group": "engine", "reason": "has not joined yet"}]
    live = page(
        replicas=[replica("a")], replicas_missing=missing, replicas_refused={"b": "another model"}, queue_length=4
    )
    assert [(one.severity, one.key) for one in of(live, "live-statistics")] == [(CONSIDER, "a")]
    counted = page(("vllm:num_requests_running", {"replica": "a"}, 0.0), replicas=[replica("engine-x", label="a")])
    assert of(counted, "live-statistics") == []
    assert [one.severity for one in of(live, "live-queue")] == [CONSIDER]
    assert [one.severity for one in of(live, "live-replicas")] == [HURTS, HURTS]


def test_a_replica_whose_updates_are_reloads_is_told_with_the_cost() -> None:
    slow = replica("a") | {"reload_reason": "quantization fp8"}
    (found,) = of(page(replicas=[slow, replica("b")]), "live-update-path")
    assert (found.severity, found.key) == (CONSIDER, "a")
    assert "quantization fp8" in found.message
    assert found.effect


def test_a_draft_that_stays_behind_the_weights_is_told_with_the_remedy() -> None:
    frozen = replica("a") | {"draft": "eagle3, frozen: no update has its tensors"}
    follows = replica("b") | {"draft": "eagle, whose weights are all the model's"}
    (first,) = of(page(replicas=[frozen, follows]), "live-draft")
    assert (first.severity, first.key) == (CONSIDER, "a")
    assert "eagle3" in str(first.value)
    assert "ngram" in first.suggestion


def test_the_rules_of_engines_judge_what_a_running_vllm_says_of_itself() -> None:
    config = {
        "model_config": {
            "model": "Qwen/Qwen2-7B",
            "dtype": "torch.bfloat16",
            "max_model_len": 4096,
            "enforce_eager": True,
        },
        "scheduler_config": {"max_num_seqs": 512, "stream_interval": 1},
        "cache_config": {"gpu_memory_utilization": 0.5},
        "device_config": {"device": "cuda"},
    }
    cache = ("vllm:cache_config_info", {"replica": "a", "num_gpu_blocks": "1000", "block_size": "16"}, 1.0)
    live = page(cache, replicas=[replica("a")])
    live = Live(live.url, live.status, live.samples, {"vllm_config": config})
    found = examine(subject_of(live=live))
    hurting = {one.rule for one in found if one.severity is HURTS}
    assert hurting == {"gpu-memory", "cuda-graphs", "stream-interval"}
    assert {one.origin for one in found if one.rule == "cuda-graphs"} == {"live"}
    (capacity,) = [one for one in found if one.rule == "live-kv-capacity"]
    assert "3.9 sequences of 4096 tokens; max_num_seqs is 512" in capacity.message
    assert {rule.id for rule in SECTIONS["Engines"]} >= hurting


@pytest.mark.parametrize("url", ["", "localhost:8100", "ftp://h"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        look(url)


def test_a_key_is_named_and_not_written_out() -> None:
    with pytest.raises(ConfigError, match="env:NAME or file:PATH"):
        look("http://127.0.0.1:1", "secret")
    with pytest.raises(ConfigError, match="no key in env:NONE"):
        look("http://127.0.0.1:1", "env:NONE", {})


def test_where_nobody_answers_the_error_names_the_url() -> None:
    with pytest.raises(GatewayUnreachable, match=r"http://127\.0\.0\.1:1/status"):
        look("http://127.0.0.1:1")


async def test_a_key_is_sent_and_its_lack_is_told(start_rig: StartRig) -> None:
    keys = {"inference_keys": ["k"], "admin_keys": ["a"], "trusted_networks": []}
    rig = await start_rig(gateway=keys)
    with pytest.raises(GatewayUnreachable, match="--key"):
        await asyncio.to_thread(look, rig.url)
    live = await asyncio.to_thread(look, rig.url, "env:KEY", {"KEY": "k"})
    assert live.serving == ["engine-0", "engine-1"]
    assert json.dumps(live.status)


def test_every_live_rule_is_tried_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [rule.id for rule in SECTIONS["A running gateway"] if f'"{rule.id}"' not in text] == []


def test_counters_of_two_looks_are_of_the_time_between_them() -> None:
    def at(preempted: float, finished: float, waiting: float) -> Live:
        labels = {"replica": "a"}
        counters = (("vllm:num_preemptions_total", preempted), ("vllm:request_success_total", finished))
        return page(*((name, labels, value) for name, value in (*counters, ("vllm:num_requests_waiting", waiting))))

    early, late = at(500, 1000, 9), at(500, 3000, 2)
    (found,) = of(late, "live-preemptions")
    assert found.severity is HURTS
    assert of(late.since(early, 30), "live-preemptions") == []
    assert late.since(early, 30).total("finished") == 2000
    assert late.since(early, 30).total("waiting") == 2
    assert early.since(late, 30).total("finished") == 1000, "the engine restarted"


async def test_a_watched_gateway_is_looked_at_twice(rig: Rig) -> None:
    await rig.complete([[5, 6, 7]] * 4, max_tokens=4)
    live = await asyncio.to_thread(watch, rig.url, "", 0.01)
    assert live.watched_s == 0.01
    assert live.total("generated") == 0


def test_a_kv_cache_of_few_sequences_is_told_without_a_limit_of_them() -> None:
    cache = ("vllm:cache_config_info", {"replica": "a", "num_gpu_blocks": "300", "block_size": "16"}, 1.0)
    live = page(cache, replicas=[replica("a")])
    live = Live(live.url, live.status, live.samples, {"vllm_config": {"model_config": {"max_model_len": 4096}}})
    (found,) = of(live, "live-kv-capacity")
    assert found.severity is CONSIDER
    assert "1.2 sequences" in found.message


def test_replicas_that_are_missing_or_were_lost_are_named_with_their_reasons() -> None:
    missing = [{"group": "policy", "reason": "engine exited with 9: out of memory"}]
    hurting, lost = of(page(replicas_missing=missing, replicas_lost={"policy": 2, "judge": 0}), "live-replicas")
    assert (hurting.severity, hurting.key) == (HURTS, "policy")
    assert "out of memory" in hurting.message
    assert (lost.severity, lost.value) == (CONSIDER, 2)
