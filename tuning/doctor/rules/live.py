"""Rules about a gateway that runs: counters since its engines started, and gauges of this moment."""

from collections.abc import Iterator

from tuning.doctor.finding import Found, consider, hurts
from tuning.doctor.live import Live
from tuning.doctor.rules.rule import VERL_GUIDE, VERL_PRACTICE, Rule, of_live
from tuning.doctor.subject import Subject

# Fewer say nothing of a share.
_ENOUGH_COMPLETIONS, _ENOUGH_TOKENS = 20, 1000
_LONG_S = 0.5
# Decoding reads all weights for each step, so that fewer sequences leave most of the GPU idle.
_FEW_SEQUENCES = 4


@Rule(
    of_live, "live-replicas", "/status replicas", "What does not serve is paid for all the same.",
    "docs/architecture.md, States of a replica",
)  # fmt: skip
def _replicas(live: Live, subject: Subject) -> Iterator[Found]:
    status, missing = live.status, live.status.get("replicas_missing", ())
    for replica_id, reason in status["replicas_refused"].items():
        yield hurts(live.setting(replica_id, "refused", "/status"), f"kept out: {reason}", "mend it, or take it out")
    for replica in status["replicas"]:
        if replica["state"] not in ("SERVING", "UPDATING"):
            setting = live.setting(replica["replica_id"], replica["state"], "/status")
            yield hurts(setting, f"takes no rollout: {replica['reason'] or 'no reason given'}", "see its log")
    nameless = status["replicas_expected"] - len(status["replicas"]) - len(missing)
    if nameless > 0:
        setting = live.setting("replicas_expected", status["replicas_expected"], "/status")
        yield hurts(setting, f"{nameless} of them are not there", "rollout-gateway status")
    for replica in missing:
        setting = live.setting(replica["group"], "missing", "/status")
        yield hurts(setting, f"a replica of {replica['group']} is not there: {replica['reason']}", "see its log")
    for group, count in status.get("replicas_lost", {}).items():
        if count:
            message = f"{count} replicas of {group} were lost since the gateway's start, and were restarted"
            setting = live.setting(f"replicas_lost.{group}", count, "/status")
            yield consider(setting, message, "see the reasons: rollout-gateway status")


@Rule(of_live, "live-statistics", "/metrics, by replica", "The rules below read engines' own counters.", VERL_GUIDE)
def _statistics(live: Live, subject: Subject) -> Iterator[Found]:
    running = live.by_replica("running")
    for label in live.serving:
        if label not in running:
            message = "its engine reports no statistics, so that nothing below counts it"
            yield consider(live.setting(label, None), message, "disable_log_stats: false (SGLang: enable_metrics)")


@Rule(
    of_live, "live-kv-capacity", "vllm:cache_config_info against max_model_len x max_num_seqs",
    "Sequences that outgrow the cache together are sent back and read again.", "vLLM's own count of blocks",
)  # fmt: skip
def _kv_capacity(live: Live, subject: Subject) -> Iterator[Found]:
    view = live.engine()
    longest = view.number("max_model_len") if view else _reported_context(live)
    most = view.number("max_num_seqs") if view else None
    for replica_id, tokens in live.kv_tokens().items() if longest else ():
        setting, whole = live.setting("kv_cache_tokens", tokens), tokens / (longest or 1)
        message = f"{replica_id}: {tokens:,} tokens of KV cache hold {whole:.1f} sequences of {longest:.0f} tokens"
        if whole < 1:
            yield hurts(setting, f"{message}: none at full length", "a smaller max_model_len, or more KV cache")
        elif most and whole < most:
            message += (
                f"; max_num_seqs is {most:.0f}, which runs where they average {tokens / most:.0f} tokens or fewer"
            )
            yield consider(setting, message, "watch preemptions; more memory, fp8 KV cache or more replicas")
        elif whole < _FEW_SEQUENCES:
            yield consider(setting, f"{message}: few run at a time", "more memory for the engine, or a smaller model")


def _reported_context(live: Live) -> float | None:
    config = (live.server_info or {}).get("vllm_config")
    model = config.get("model_config") if isinstance(config, dict) else None
    length = model.get("max_model_len") if isinstance(model, dict) else None
    return float(length) if isinstance(length, int) else None


@Rule(
    of_live, "live-preemptions", "vllm:num_preemptions against vllm:request_success",
    "A preempted sequence is computed again from its beginning.", f"{VERL_GUIDE}: no preemption",
)  # fmt: skip
def _preemptions(live: Live, subject: Subject) -> Iterator[Found]:
    preempted, finished = live.total("preemptions"), live.total("finished")
    if not preempted:
        return
    when = f" in {live.watched_s:.0f} s" if live.watched_s else ""
    share = f"{preempted / finished:.1%} of {finished:.0f} completions" if finished else "none has ended yet"
    judge = hurts if not finished or preempted / finished > 0.01 else consider
    message = f"{preempted:.0f} sequences lost their KV cache{when} and were read again ({share})"
    instead = "more KV cache (gpu_memory_utilization), a smaller max_num_seqs, or more replicas"
    yield judge(live.setting("num_preemptions", int(preempted)), message, instead)


@Rule(
    of_live, "live-waiting", "vllm:num_requests_waiting, num_requests_running, kv_cache_usage_perc",
    "With KV cache to spare, max_num_seqs is what holds requests back.",
    f"{VERL_GUIDE}: raise max_num_seqs where cache use is low",
)  # fmt: skip
def _waiting(live: Live, subject: Subject) -> Iterator[Found]:
    waiting, running, usage = (live.by_replica(name) for name in ("waiting", "running", "kv_usage"))
    for replica_id, count in waiting.items():
        used = usage.get(replica_id, 0)
        message = (
            f"{replica_id}: {count:.0f} wait beside {running.get(replica_id, 0):.0f} that run, with {used:.0%} of "
        )
        message += "the KV cache in use"
        setting = live.setting("num_requests_waiting", int(count))
        if count and used < 0.5:
            yield hurts(setting, f"{message}: max_num_seqs holds them back", "a larger max_num_seqs")
        elif count:
            yield consider(setting, message, "more KV cache, or more replicas")


@Rule(
    of_live, "live-update-path", "/status replicas, reload_reason",
    "A reload runs each loader twice and copies each layer once more.", "docs/benchmarks.md, Weight updates",
)  # fmt: skip
def _update_path(live: Live, subject: Subject) -> Iterator[Found]:
    view = live.engine()
    for replica in live.status["replicas"]:
        reason = replica.get("reload_reason")
        if reason and not (view and view.on_cpu):  # there vLLM packs each weight, whatever the model
            message = f"an update is a reload by the engine itself, for which generation stops: {reason}"
            effect = "1.3 s for 16 GB of experts in 4,719 tensors on an H200, against 0.15 s in place"
            yield consider(live.setting(replica["replica_id"], "reload", "/status"), message, "", effect)


@Rule(
    of_live, "live-queue", "/status queue_length, gate_closed_for",
    "A queue that stays means too few replicas; one behind a closed gate is a weight update.", "docs/architecture.md",
)  # fmt: skip
def _queue(live: Live, subject: Subject) -> Iterator[Found]:
    queued, closed = live.status["queue_length"], live.status["gate_closed_for"]
    setting = live.setting("queue_length", queued, "/status")
    if queued and closed:
        yield consider(setting, f"{queued} rollouts wait at the gate, closed for: {closed}", "see the weight update")
    elif queued:
        message = f"{queued} rollouts wait for room on a replica"
        yield consider(setting, message, "more replicas, or a larger max_num_seqs")


@Rule(
    of_live, "live-prefix-hits", "vllm:prefix_cache_hits, prefix_cache_queries",
    "Prompts of a group and turns of a session begin alike.", "vLLM's own count of tokens",
)  # fmt: skip
def _prefix_hits(live: Live, subject: Subject) -> Iterator[Found]:
    asked, hit = live.total("prefix_queries"), live.total("prefix_hits")
    if asked and hit is not None and asked >= _ENOUGH_TOKENS and hit / asked < 0.05:
        message = f"{hit / asked:.0%} of {asked:.0f} prompt tokens were in the cache"
        instead = "prefix caching on; sessions (X-Session-ID) for agents; groups as n > 1"
        yield consider(live.setting("prefix_cache_hits", round(hit / asked, 3)), message, instead)


@Rule(
    of_live, "live-imbalance", "vllm:generation_tokens by replica",
    "A step ends with the last completion of the busiest replica.", "docs/architecture.md",
)  # fmt: skip
def _imbalance(live: Live, subject: Subject) -> Iterator[Found]:
    for model in dict.fromkeys(replica["model"] for replica in live.status["replicas"]):
        members = [replica["label"] for replica in live.status["replicas"] if replica["model"] == model]
        made = {name: tokens for name, tokens in live.by_replica("generated").items() if name in members}
        if len(made) < 2 or sum(made.values()) < _ENOUGH_TOKENS:
            continue
        most = max(made, key=lambda name: made[name])
        ratio = made[most] / (sum(made.values()) / len(made))
        since = f"in {live.watched_s:.0f} s" if live.watched_s else "since they started"
        if ratio > 1.2:
            setting = live.setting("generation_tokens", {name: int(tokens) for name, tokens in made.items()})
            message = f"{model}: {most} made {ratio:.2f} times the mean of its {len(made)} replicas {since}"
            judge = hurts if ratio > 1.5 else consider
            yield judge(setting, message, "see whether replica started late, or sessions hold on to it")


@Rule(
    of_live, "live-clipped", "vllm:request_success by finished_reason",
    "A completion cut before its answer earns no reward. The canary's requests for one token count too.",
    f"{VERL_PRACTICE}: a clip ratio above 0.1 means truncation",
)  # fmt: skip
def _clipped(live: Live, subject: Subject) -> Iterator[Found]:
    cut, stopped = (live.total("finished", finished_reason=reason) or 0 for reason in ("length", "stop"))
    ended = cut + stopped
    if ended >= _ENOUGH_COMPLETIONS and cut / ended > 0.1:
        setting = live.setting("request_success finished_reason=length", round(cut / ended, 3))
        message = f"{cut / ended:.0%} of {ended:.0f} completions ended because they reached their length"
        instead = "a larger response length (max_tokens, max_response_length, max_completion_length)"
        yield hurts(setting, message, instead)


@Rule(
    of_live, "live-update-cost", "/status last_weight_update", "Generation stands while weights move.",
    "docs/benchmarks.md, Weight updates: 0.08 to 0.11 s for 15 GB over NVLink",
)  # fmt: skip
def _update_cost(live: Live, subject: Subject) -> Iterator[Found]:
    seconds = live.seconds_of_update_steps()
    step = max(seconds, key=lambda name: seconds[name], default="")
    setting = live.setting("last_weight_update", {name: round(value, 3) for name, value in seconds.items()}, "/status")
    message = f"the steps of the last update took {sum(seconds.values()):.2f} s, most of it {step}"
    if step == "drain" and seconds[step] > 1:
        yield consider(setting, message, "pause with mode=keep, so that rollouts in flight go on after the update")
    elif step == "store" and seconds[step] > _LONG_S:
        message += ": it waited for the weight store, which wrote or removed a version"
        yield consider(setting, message, "a weights.store in memory with huge pages (docs/deployment.md, Memory)")
