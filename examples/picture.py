"""Draws a training run: the reward curve above, the states of each replica below."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.demo import Sight

_COLORS = {
    "generating": "#2a9d8f",
    "idle": "#e9ecef",
    "UPDATING": "#e76f51",
    "SYNCING": "#f4a261",
    "SUSPECT": "#6c757d",
}


def draw(steps: Sequence[dict[str, Any]], sights: "Sequence[Sight]", path: Path) -> None:
    """Write a PNG. `steps` have at_s, reward, weight_version; `sights` are in order of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 6), height_ratios=(2, 1), sharex=True, layout="constrained"
    )
    _draw_reward(above, steps)
    _draw_replicas(below, sights)
    below.legend(
        handles=[Patch(color=color, label=name.lower()) for name, color in _COLORS.items()],
        ncols=len(_COLORS),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_reward(axes: Any, steps: Sequence[dict[str, Any]]) -> None:
    times, rewards = [step["at_s"] for step in steps], [step["reward"] for step in steps]
    smooth = [sum(rewards[max(0, i - 3) : i + 1]) / len(rewards[max(0, i - 3) : i + 1]) for i in range(len(rewards))]
    axes.plot(times, rewards, "o", color="#adb5bd", markersize=4, label="step")
    axes.plot(times, smooth, color="#264653", linewidth=2, label="mean of 4 steps")
    axes.set_ylabel("reward")
    axes.set_title(
        f"GRPO on digit sorting: {len(steps)} steps, weight version {steps[-1]['weight_version']} at the end"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_replicas(axes: Any, sights: "Sequence[Sight]") -> None:
    """Draw one bar per replica; a stretch lasts until the replica's next sight."""
    replicas = sorted({sight.replica_id for sight in sights})
    for row, replica in enumerate(replicas):
        own = [sight for sight in sights if sight.replica_id == replica]
        for sight, after in itertools.pairwise(own):
            axes.barh(row, after.at_s - sight.at_s, left=sight.at_s, height=0.7, color=_COLORS.get(_activity(sight)))
    axes.set_yticks(range(len(replicas)), replicas)
    axes.set_xlabel("seconds")
    axes.set_title("what each replica did", fontsize=10)


def _activity(sight: "Sight") -> str:
    if sight.state != "SERVING":
        return sight.state
    return "generating" if sight.samples_in_flight else "idle"
