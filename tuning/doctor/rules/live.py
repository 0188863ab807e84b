"""Rules about a gateway that runs: counters since its engines started, and gauges of this moment."""

from collections.abc import Iterator

from tuning.doctor.finding import Found, consider, fine, hurts
from tuning.doctor.live import Live
from tuning.doctor.rules.rule import VERL_GUIDE, VERL_PRACTICE, live_rule
from tuning.doctor.subject import Subject

# Fewer say nothing of a share.
_ENOUGH_COMPLETIONS = 20
_ENOUGH_TOKENS = 1000
_DRAFT_REMEDY = (
    "compare tokens per second without speculative_config; ngram and suffix have no weights that age, MTP layers "
    "follow where the trainer sends them, another draft is trained again and the engine restarted with it"
)
_LONG_S = 0.5
# Decoding reads all weights for each step, so that fewer sequences leave most of the GPU idle.
_FEW_SEQUENCES = 4


@live_rule(
    id="live-replicas",
    asks="Does every replica serve?",
    reads="/status replicas",
    why="What does not serve is paid for all the same.",
    source="docs/architecture.md, States of a replica",
)
def _replicas(live: Live, subject: Subject) -> Iterator[Found]:
    for replica_id, reason in live.status["replicas_refused"].items():
        yield hurts(live.setting(replica_id, "refused", "/status"), f"kept out: {reason}", "mend it, or take it out")
    for replica in live.status["replicas"]:
        setting = live.setting(replica["replica_id"], replica["state"], "/status")
        if replica["state"] in ("SERVING", "UPDATING"):
            yield fine(setting, f"version {replica['weight_version']}")
        else:
            yield hurts(setting, f"takes no rollout: {replica['reason'] or 'no reason given'}", "see its log")
    missing = live.status.get("replicas_missing", ())
    nameless = live.status["replicas_expected"] - len(live.status["replicas"]) - len(missing)
    if nameless > 0:
        setting = live.setting("replicas_expected", live.status["replicas_expected"], "/status")
        yield hurts(setting, f"{nameless} of them are not there", "rollout-gateway status")
    for replica in missing:
        setting = live.setting(replica["group"], "missing", "/status")
        yield hurts(setting, f"a replica of {replica['group']} is not there: {replica['reason']}", "see its log")
    for group, count in live.status.get("replicas_lost", {}).items():
        if count:
            message = f"{count} replicas of {group} were lost since the gateway's start, and were restarted"
            yield consider(
                live.setting(f"replicas_lost.{group}", count, "/status"),
                message,
                "see the reasons: rollout-gateway status",
            )


@live_rule(
    id="live-statistics",
    asks="Does every engine report its statistics?",
    reads="/metrics, by replica",
    why="The rules below read engines' own counters.",
    source=VERL_GUIDE,
)
def _statistics(live: Live, subject: Subject) -> Iterator[Found]:
    running = live.by_replica("running")
    for label in live.serving:
        if label not in running:
            message = "its engine reports no statistics, so that nothing below counts it"
            yield consider(live.setting(label, None), message, "disable_log_stats: false (SGLang: enable_metrics)")


@live_rule(
    id="live-kv-capacity",
    asks="How many whole sequences does the KV cache hold?",
    reads="vllm:cache_config_info against max_model_len x max_num_seqs",
    why="Sequences that outgrow the cache together are sent back and read again.",
    source="vLLM's own count of blocks",
)
def _kv_capacity(live: Live, subject: Subject) -> Iterator[Found]:
    view = live.engine()
    longest = view.number("max_model_len") if view else _reported_context(live)
    most = view.number("max_num_seqs") if view else None
    for replica_id, tokens in live.kv_tokens().items():
        setting = live.setting("kv_cache_tokens", tokens)
        if not longest:
            yield fine(setting, f"{replica_id}: {tokens:,} tokens")
            continue
        whole = tokens / longest
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
        else:
            yield fine(setting, message)


def _reported_context(live: Live) -> float | None:
    config = (live.server_info or {}).get("vllm_config")
    model = config.get("model_config") if isinstance(config, dict) else None
    length = model.get("max_model_len") if isinstance(model, dict) else None
    return float(length) if isinstance(length, int) else None


@live_rule(
    id="live-preemptions",
    asks="Are sequences sent back for lack of KV cache?",
    reads="vllm:num_preemptions against vllm:request_success",
    why="A preempted sequence is computed again from its beginning.",
    source=f"{VERL_GUIDE}: no preemption",
)
def _preemptions(live: Live, subject: Subject) -> Iterator[Found]:
    preempted, finished = live.total("preemptions"), live.total("finished")
    if preempted is None:
        return
    setting = live.setting("num_preemptions", int(preempted))
    if not preempted:
        yield fine(setting, "no sequence was sent back")
        return
    when = f" in {live.watched_s:.0f} s" if live.watched_s else ""
    share = f"{preempted / finished:.1%} of {finished:.0f} completions" if finished else "none has ended yet"
    judge = hurts if not finished or preempted / finished > 0.01 else consider
    message = f"{preempted:.0f} sequences lost their KV cache{when} and were read again ({share})"
    yield judge(setting, message, "more KV cache (gpu_memory_utilization), a smaller max_num_seqs, or more replicas")


@live_rule(
    id="live-waiting",
    asks="Do requests wait while there is room?",
    reads="vllm:num_requests_waiting, num_requests_running, kv_cache_usage_perc",
    why="With KV cache to spare, max_num_seqs is what holds requests back.",
    source=f"{VERL_GUIDE}: raise max_num_seqs where cache use is low",
)
def _waiting(live: Live, subject: Subject) -> Iterator[Found]:
    waiting, running, usage = (live.by_replica(name) for name in ("waiting", "running", "kv_usage"))
    for replica_id, count in waiting.items():
        setting = live.setting("num_requests_waiting", int(count))
        message = f"{replica_id}: {count:.0f} wait beside {running.get(replica_id, 0):.0f} that run, with "
        message += f"{usage.get(replica_id, 0):.0%} of the KV cache in use"
        if not count:
            yield fine(setting, f"{replica_id}: none waits")
        elif usage.get(replica_id, 0) < 0.5:
            yield hurts(setting, f"{message}: max_num_seqs holds them back", "a larger max_num_seqs")
        else:
            yield consider(setting, message, "more KV cache, or more replicas")


@live_rule(
    id="live-update-path",
    asks="Are weight updates loaded in place?",
    reads="/status replicas, reload_reason",
    why="A reload runs each loader twice and copies each layer once more.",
    source="docs/benchmarks.md, Weight updates",
)
def _update_path(live: Live, subject: Subject) -> Iterator[Found]:
    view = live.engine()
    for replica in live.status["replicas"]:
        reason = replica.get("reload_reason")
        if reason and not (view and view.on_cpu):  # there vLLM packs each weight, whatever the model
            message = f"an update is a reload by the engine itself, for which generation stops: {reason}"
            effect = "1.3 s for 16 GB of experts in 4,719 tensors on an H200, against 0.15 s in place"
            yield consider(live.setting(replica["replica_id"], "reload", "/status"), message, "", effect)


@live_rule(
    id="live-draft",
    asks="Does the draft follow the weights?",
    reads="/status replicas, draft",
    why="The target checks each token of a draft, so old weights there make tokens slower, not wrong.",
    source="docs/design/weight-updates.md, Speculative decoding",
)
def _draft(live: Live, subject: Subject) -> Iterator[Found]:
    for replica in live.status["replicas"]:
        if not (draft := replica.get("draft")):
            continue
        setting = live.setting(replica["replica_id"], draft, "/status")
        if ", frozen: " in draft:
            yield consider(
                setting, "updates leave the draft as it is: tokens are right, and come slower", _DRAFT_REMEDY
            )
        else:
            yield fine(setting, "no weights of the draft stay behind")


@live_rule(
    id="live-queue",
    asks="Do rollouts wait in the gateway?",
    reads="/status queue_length, gate_closed_for",
    why="A queue that stays means too few replicas; one behind a closed gate is a weight update.",
    source="docs/architecture.md",
)
def _queue(live: Live, subject: Subject) -> Iterator[Found]:
    queued, closed = live.status["queue_length"], live.status["gate_closed_for"]
    setting = live.setting("queue_length", queued, "/status")
    if queued and closed:
        yield consider(setting, f"{queued} rollouts wait at the gate, closed for: {closed}", "see the weight update")
    elif queued:
        yield consider(
            setting, f"{queued} rollouts wait for room on a replica", "more replicas, or a larger max_num_seqs"
        )
    else:
        yield fine(setting, "no rollout waits")


@live_rule(
    id="live-prefix-hits",
    asks="Are equal prefixes read once?",
    reads="vllm:prefix_cache_hits, prefix_cache_queries",
    why="Prompts of a group and turns of a session begin alike.",
    source="vLLM's own count of tokens",
)
def _prefix_hits(live: Live, subject: Subject) -> Iterator[Found]:
    asked, hit = live.total("prefix_queries"), live.total("prefix_hits")
    if not asked or hit is None or asked < _ENOUGH_TOKENS:
        return
    setting = live.setting("prefix_cache_hits", round(hit / asked, 3))
    message = f"{hit / asked:.0%} of {asked:.0f} prompt tokens were in the cache"
    if hit / asked < 0.05:
        yield consider(setting, message, "prefix caching on; sessions (X-Session-ID) for agents; groups as n > 1")
    else:
        yield fine(setting, message)


@live_rule(
    id="live-imbalance",
    asks="Do replicas of one model work alike?",
    reads="vllm:generation_tokens by replica",
    why="A step ends with the last completion of the busiest replica.",
    source="docs/architecture.md",
)
def _imbalance(live: Live, subject: Subject) -> Iterator[Found]:
    for model in dict.fromkeys(replica["model"] for replica in live.status["replicas"]):
        members = [replica["label"] for replica in live.status["replicas"] if replica["model"] == model]
        made = {name: tokens for name, tokens in live.by_replica("generated").items() if name in members}
        if len(made) < 2 or sum(made.values()) < _ENOUGH_TOKENS:
            continue
        most = max(made, key=lambda name: made[name])
        ratio = made[most] / (sum(made.values()) / len(made))
        setting = live.setting("generation_tokens", {name: int(tokens) for name, tokens in made.items()})
        since = f"in {live.watched_s:.0f} s" if live.watched_s else "since they started"
        message = f"{model}: {most} made {ratio:.2f} times the mean of its {len(made)} replicas {since}"
        if ratio > 1.5:
            yield hurts(setting, message, "see whether replica started late, or sessions hold on to it")
        elif ratio > 1.2:
            yield consider(setting, message, "see whether replica started late, or sessions hold on to it")
        else:
            yield fine(setting, message)


@live_rule(
    id="live-clipped",
    asks="Are completions cut?",
    reads="vllm:request_success by finished_reason",
    why="A completion cut before its answer earns no reward. The canary's requests for one token count too.",
    source=f"{VERL_PRACTICE}: a clip ratio above 0.1 means truncation",
)
def _clipped(live: Live, subject: Subject) -> Iterator[Found]:
    lengths = live.total("finished", finished_reason="length")
    stops = live.total("finished", finished_reason="stop")
    if lengths is None and stops is None:
        return
    ended = (lengths or 0) + (stops or 0)
    if ended < _ENOUGH_COMPLETIONS:
        return
    share = (lengths or 0) / ended
    setting = live.setting("request_success finished_reason=length", round(share, 3))
    message = f"{share:.0%} of {ended:.0f} completions ended because they reached their length"
    if share > 0.1:
        yield hurts(
            setting, message, "a larger response length (max_tokens, max_response_length, max_completion_length)"
        )
    else:
        yield fine(setting, message)


@live_rule(
    id="live-update-cost",
    asks="What does a weight update cost?",
    reads="/status last_weight_update",
    why="Generation stands while weights move.",
    source="docs/benchmarks.md, Weight updates: 0.08 to 0.11 s for 15 GB over NVLink",
)
def _update_cost(live: Live, subject: Subject) -> Iterator[Found]:
    seconds = live.seconds_of_update_steps()
    if not seconds:
        return
    whole = sum(seconds.values())
    step = max(seconds, key=lambda name: seconds[name])
    setting = live.setting("last_weight_update", {name: round(value, 3) for name, value in seconds.items()}, "/status")
    message = f"the steps of the last update took {whole:.2f} s, most of it {step} ({seconds[step]:.2f} s)"
    if step == "drain" and seconds[step] > 1:
        yield consider(setting, message, "pause with mode=keep, so that rollouts in flight go on after the update")
    elif step == "store" and seconds[step] > _LONG_S:
        message += ": it waited for the weight store, which wrote or removed a version"
        yield consider(setting, message, "a weights.store in memory with huge pages (docs/deployment.md, Memory)")
    else:
        yield fine(setting, message)
