"""The part that a run waited for, by the figures of the load generator, the gateway and its engines."""

from collections.abc import Iterator, Mapping

# Requests that wait on average, and a share of the KV cache, from which they count.
_WAIT = 0.5
_FULL = 0.9
_LATE_S = 0.1
_BUSY = 0.9
# Fraction of the completions in flight that no part has, from which the way to the engines is what holds a run back.
_ON_THEIR_WAY = 0.3


def causes(figures: Mapping[str, float]) -> list[str]:
    """Return a sentence for each part that held the run back; the engines themselves where none did. Empty for a server
    that reports nothing."""
    found = [*late(figures), *_cpu(figures), *_way(figures), *_gateway(figures), *_engines(figures)]
    if not found and "engine_running.mean" in figures:
        found = [f"nothing waited: {figures['engine_running.mean']:.1f} requests ran at a time, as fast as engines are"]
    return found


def late(figures: Mapping[str, float]) -> list[str]:
    """Return why the run is invalid: a generator that sends late measures itself. Empty where it was in time."""
    lateness = figures.get("lateness_s.p99", 0.0)
    if lateness < _LATE_S:
        return []
    return [f"the load generator sent requests up to {lateness:.2g} s late (p99): give it more --processes"]


def _cpu(figures: Mapping[str, float]) -> list[str]:
    busy = figures.get("machine_cpu.mean", 0.0)
    if busy < _BUSY:
        return []
    return [f"the CPUs of this machine were {busy:.0%} busy on average: what runs here waits for them"]


def _way(figures: Mapping[str, float]) -> Iterator[str]:
    """Compare the completions that the client waits for with those that a part holds: the rest is work of CPUs."""
    if "engine_running.mean" not in figures or not figures.get("seconds"):
        return
    in_flight = figures.get("completion_s.sum", 0.0) / figures["seconds"]
    held = sum(figures.get(f"{part}.mean", 0.0) for part in ("engine_running", "engine_waiting", "gateway_queue"))
    if (between := in_flight - held) >= max(1.0, _ON_THEIR_WAY * in_flight):
        yield (
            f"{between:.1f} of {in_flight:.1f} completions in flight were between client and engines on average: the "
            "CPU of the gateway, of an engine's API process or of the load generator holds them back"
        )


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
