"""The doctor at a running gateway: real HTTP, simulated engines."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.samples import Sample

from engines.errors import ConfigError, GatewayUnreachable
from tests.rigs.calls import until
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


def counted(**figures: float) -> Live:
    """A page with the figures of one vLLM replica."""
    return page(*((f"vllm:{name}", {"replica": "a"}, value) for name, value in figures.items()))


def made(*tokens: float) -> Live:
    """A page of replicas that have made so many tokens each."""
    names = [f"r{index}" for index in range(len(tokens))]
    samples = (("vllm:generation_tokens_total", {"replica": name}, n) for name, n in zip(names, tokens, strict=True))
    return page(*samples, replicas=[replica(f"engine-{name}", label=name) for name in names])


def waiting(usage: float) -> Live:
    return counted(num_requests_waiting=7.0, num_requests_running=8.0, kv_cache_usage_perc=usage)


def copied(store_s: float) -> Live:
    return page(last_weight_update={"seconds": {"store": store_s, "transfer": 0.05}})


SLOW = replica("a") | {"reload_reason": "quantization fp8"}
NOT_JOINED = [{"group": "engine", "reason": "has not joined yet: out of memory"}]
FEW_TOKENS = ("vllm:cache_config_info", {"replica": "a", "kv_cache_size_tokens": "4800"}, 1.0)
LENGTH = {"vllm_config": {"model_config": {"max_model_len": 4096}}}
FEW = replace(page(FEW_TOKENS, replicas=[replica("a")]), server_info=LENGTH)


@pytest.mark.parametrize(
    ("rule", "live", "severities", "words"), [
        ("live-update-cost", copied(1.3), [CONSIDER], "huge pages"), ("live-update-cost", copied(0.3), [], ""),
        ("live-prefix-hits", counted(prefix_cache_queries_total=2000, prefix_cache_hits_total=20), [CONSIDER], "0.01"),
        ("live-prefix-hits", counted(prefix_cache_queries_total=2000, prefix_cache_hits_total=1000), [], ""),
        ("live-waiting", waiting(0.1), [HURTS], "max_num_seqs"), ("live-waiting", waiting(0.95), [CONSIDER], ""),
        ("live-waiting", page(("sglang:num_queue_reqs", {"replica": "a"}, 3.0),
                              ("sglang:token_usage", {"replica": "a"}, 0.1)), [HURTS], "max_num_seqs"),
        ("live-imbalance", made(9000, 1000, 1000), [HURTS], ""),
        ("live-imbalance", made(2600, 2000, 1600), [CONSIDER], ""),
        ("live-imbalance", made(2000, 2100), [], ""), ("live-imbalance", made(5, 0), [], ""),
        ("live-update-path", page(replicas=[SLOW, replica("b")]), [CONSIDER], "quantization fp8"),
        ("live-statistics", page(replicas=[replica("a")]), [CONSIDER], ""),
        ("live-statistics", page(("vllm:num_requests_running", {"replica": "a"}, 0.0),
                                 replicas=[replica("engine-x", label="a")]), [], ""),
        ("live-queue", page(queue_length=4), [CONSIDER], ""),
        ("live-replicas", page(replicas_missing=NOT_JOINED, replicas_refused={"b": "another model"}), [HURTS, HURTS],
         "out of memory"),
        ("live-replicas", page(replicas_lost={"policy": 2, "judge": 0}), [CONSIDER], "2"),
        ("live-kv-capacity", FEW, [CONSIDER], "1.2 sequences"),
    ],
)  # fmt: skip
def test_a_page_has_these_findings(rule: str, live: Live, severities: list[Severity], words: str) -> None:
    found = of(live, rule)
    assert [one.severity for one in found] == severities
    assert words in " ".join(f"{one.value} {one.message} {one.suggestion}" for one in found)


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


async def test_a_replica_that_is_gone_hurts(rig: Rig) -> None:
    await rig.replicas[1].kill()
    await until(rig.states, lambda got: got.get("engine-1") != "SERVING")
    told = (await examined(rig))["live-replicas"]
    assert [one.severity for one in told if one.key != "replicas_lost.engine"] == [HURTS]
    assert told[0].place == f"{rig.url}/status"


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
    cache = ("vllm:cache_config_info", {"replica": "a", "kv_cache_size_tokens": "16000"}, 1.0)
    live = page(cache, replicas=[replica("a")])
    live = Live(live.url, live.status, live.samples, {"vllm_config": config})
    found = examine(subject_of(live=live))
    hurting = {one.rule for one in found if one.severity is HURTS}
    assert hurting == {"gpu-memory", "cuda-graphs", "stream-interval"}
    assert {one.origin for one in found if one.rule == "cuda-graphs"} == {"live"}
    (capacity,) = [one for one in found if one.rule == "live-kv-capacity"]
    assert "3.9 sequences of 4096 tokens; max_num_seqs is 512" in capacity.message
    assert {rule.id for rule in SECTIONS["Engines"]} >= hurting


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
