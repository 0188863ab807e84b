"""Draws a training run: rewards, speed and weight syncs above, states and weight versions of each replica below.

Time begins with the first weight sync or rollout; the trainer's own start is left out.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.demo import Sight

_IDLE = "idle"
_EACH_VERSION = 4
_COLORS = {
    "generating": "#2a9d8f",
    "idle": "#e9ecef",
    "UPDATING": "#e76f51",
    "SYNCING": "#f4a261",
    "SUSPECT": "#6c757d",
}


def draw(steps: Sequence[dict[str, Any]], sights: "Sequence[Sight]", path: Path) -> None:
    """Write a PNG. `steps` have at_s, reward, weight_version, tokens_per_s, sync_s; `sights` are in order of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    began = training_began(sights)
    figure, (above, middle, below) = pyplot.subplots(
        3, 1, figsize=(11, 8), height_ratios=(2, 1.2, 1.2), sharex=True, layout="constrained"
    )
    times = [step["at_s"] - began for step in steps]
    _draw_reward(above, times, steps)
    _draw_speed(middle, times, steps)
    _draw_replicas(below, began, sights)
    below.set_xlim(0, max(sight.at_s for sight in sights) - began)
    below.legend(
        handles=[Patch(color=color, label=name.lower()) for name, color in _COLORS.items()],
        ncols=len(_COLORS),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def training_began(sights: "Sequence[Sight]") -> float:
    """Return the time of the first sight of a replica at work; 0 if there is none."""
    return next((sight.at_s for sight in sights if _activity(sight) != _IDLE), 0.0)


def version_runs(sights: "Sequence[Sight]") -> list[tuple[int, float, float]]:
    """Return version, first and last sight of each stretch in which one replica held one version."""
    runs: list[tuple[int, float, float]] = []
    for sight in sights:
        if sight.weight_version is None:
            continue
        if runs and runs[-1][0] == sight.weight_version:
            runs[-1] = (sight.weight_version, runs[-1][1], sight.at_s)
        else:
            runs.append((sight.weight_version, sight.at_s, sight.at_s))
    return runs


def _draw_reward(axes: Any, times: Sequence[float], steps: Sequence[dict[str, Any]]) -> None:
    rewards = [step["reward"] for step in steps]
    smooth = [sum(rewards[max(0, i - 3) : i + 1]) / len(rewards[max(0, i - 3) : i + 1]) for i in range(len(rewards))]
    axes.plot(times, rewards, "o", color="#adb5bd", markersize=4, label="step")
    axes.plot(times, smooth, color="#264653", linewidth=2, label="mean of 4 steps")
    axes.set_ylabel("reward")
    axes.set_title(
        f"GRPO on digit sorting: {len(steps)} steps, weight version {steps[-1]['weight_version']} at the end"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_speed(axes: Any, times: Sequence[float], steps: Sequence[dict[str, Any]]) -> None:
    axes.plot(times, [step["tokens_per_s"] for step in steps], color="#2a9d8f", linewidth=2)
    axes.set_ylabel("tokens/s", color="#2a9d8f")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    syncs = axes.twinx()
    syncs.plot(times, [step["sync_s"] for step in steps], "s", color="#e76f51", markersize=4)
    syncs.set_ylabel("weight sync, seconds", color="#e76f51")
    syncs.set_ylim(bottom=0)


def _draw_replicas(axes: Any, began: float, sights: "Sequence[Sight]") -> None:
    """Draw one bar per replica, with its weight versions; a stretch lasts until the replica's next sight."""
    replicas = sorted({sight.replica_id for sight in sights})
    for row, replica in enumerate(replicas):
        own = [sight for sight in sights if sight.replica_id == replica and sight.at_s >= began]
        for sight, after in itertools.pairwise(own):
            left, width = sight.at_s - began, after.at_s - sight.at_s
            axes.barh(row, width, left=left, height=0.6, color=_COLORS.get(_activity(sight)))
        for version, first, last in version_runs(own)[::_EACH_VERSION]:
            axes.text((first + last) / 2 - began, row + 0.4, str(version), ha="center", fontsize=7)
    axes.set_yticks(range(len(replicas)), replicas)
    axes.set_ylim(-0.45, len(replicas) - 0.35)  # room for the versions over the highest bar
    axes.set_xlabel("seconds since training began")
    axes.set_title(f"what each replica did, with every {_EACH_VERSION}th weight version that it served", fontsize=10)


def _activity(sight: "Sight") -> str:
    if sight.state != "SERVING":
        return sight.state
    return "generating" if sight.samples_in_flight else _IDLE
