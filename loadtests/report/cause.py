"""The part that a run waited for, by the figures of the load generator, the gateway and its engines."""

from collections.abc import Mapping

# Requests that wait on average, and a share of the KV cache, from which they count.
_WAIT = 0.5
_FULL = 0.9
_LATE_S = 0.1


def causes(figures: Mapping[str, float]) -> list[str]:
    """Return a sentence for each part that held the run back; the engines themselves where none did. Empty for a server
    that reports nothing."""
    found = [*_generator(figures), *_gateway(figures), *_engines(figures)]
    if not found and "engine_running.mean" in figures:
        found = [f"nothing waited: {figures['engine_running.mean']:.1f} requests ran at a time, as fast as engines are"]
    return [*_spike(figures), *found]


def _spike(figures: Mapping[str, float]) -> list[str]:
    if "after.completions" not in figures:
        return []
    if "recovery_s" not in figures:
        return ["first tokens did not come as soon as before the spike again until the run ended"]
    return [f"first tokens came as soon as before the spike again within {figures['recovery_s']:.0f} s of its end"]


def _generator(figures: Mapping[str, float]) -> list[str]:
    late = figures.get("lateness_s.p99", 0.0)
    if late < _LATE_S:
        return []
    return [f"the load generator sent requests up to {late:.2g} s late (p99): give it more --processes"]


def _gateway(figures: Mapping[str, float]) -> list[str]:
    found = []
    if (queued := figures.get("gateway_queue.mean", 0.0)) >= _WAIT:
        found.append(f"{queued:.1f} rollouts waited in the gateway on average: more replicas, or a larger max_num_seqs")
    least, most = figures.get("replicas_serving.min", 0.0), figures.get("replicas_serving.max", 0.0)
    if least < most:
        found.append(f"{least:.0f} to {most:.0f} replicas served: the others updated, started or were gone")
    return found


def _engines(figures: Mapping[str, float]) -> list[str]:
    waiting, usage = figures.get("engine_waiting.mean", 0.0), figures.get("engine_kv.p90", 0.0)
    found = []
    if waiting >= _WAIT and usage < _FULL:
        found.append(
            f"{waiting:.1f} requests waited in engines on average beside a KV cache that was {usage:.0%} full (p90): "
            "max_num_seqs holds them back"
        )
    elif waiting >= _WAIT:
        found.append(
            f"{waiting:.1f} requests waited in engines on average for KV cache, {usage:.0%} full (p90): more of it, "
            "or more replicas"
        )
    if preempted := figures.get("engine_preempted.sum", 0.0):
        found.append(f"{preempted:.0f} sequences lost their KV cache and were read again: more, or fewer at a time")
    return found
