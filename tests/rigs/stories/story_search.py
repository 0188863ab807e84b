"""Random stories: a strategy for steps and worlds, and the search for a story that breaks a promise."""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, currently_in_test_context, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engines.types import InFlight, PauseMode
from tests.rigs import virtual_time
from tests.rigs.stories.interleaving import world_of
from tests.rigs.stories.story import (
    AbortAll,
    Kill,
    LoadAdapter,
    Pause,
    PushStep,
    RelayDies,
    RestartGateway,
    Resume,
    Rollout,
    ScaleDown,
    ScaleUp,
    Step,
    Stop,
    Story,
    UnloadAdapter,
)

MOST_STEPS = 14
_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
_KEPT_LINES = 60

_AFTER = st.sampled_from((0.0, 0.0, 0.02, 0.1, 0.3, 1.0, 3.0))
_ENGINE = st.integers(0, 3)
_IN_FLIGHT = st.sampled_from((None, *InFlight))
_SLOW = st.sampled_from((0.0, 0.0, 0.05, 0.5, 2.0, 25.0))
_PUSH = st.builds(
    PushStep,
    _AFTER,
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
    st.sampled_from((False, False, False, True)),
    _IN_FLIGHT,
    _SLOW,
    st.sampled_from((None, None, None, 0.01, 0.05, 0.2, 0.5, 1.0, 4.0)),
)
_NO = st.just(False)
_STAGED_PUSH = st.builds(
    PushStep,
    _AFTER,
    st.integers(0, 1),
    _NO,
    _NO,
    st.booleans(),
    _IN_FLIGHT,
    st.sampled_from((0.0, 0.0, 0.05)),
    st.sampled_from((None, None, None, 0.2, 0.5)),
)
_ROLLOUT = st.builds(
    Rollout, _AFTER, st.sampled_from((3, 30, 90)), st.booleans(), st.sampled_from((False, False, True))
)
_OTHERS = [
    (6, _ROLLOUT),
    (2, st.builds(Kill, _AFTER, _ENGINE)),
    (2, st.builds(Stop, _AFTER, _ENGINE, st.sampled_from((0.3, 2.0, 7.0, 20.0)))),
    (1, st.builds(Pause, _AFTER, st.sampled_from(list(PauseMode)), st.booleans())),
    (2, st.builds(Resume, _AFTER)),
    (1, st.builds(AbortAll, _AFTER)),
    (1, st.builds(LoadAdapter, _AFTER)),
    (1, st.builds(UnloadAdapter, _AFTER)),
    (1, st.builds(ScaleUp, _AFTER)),
    (1, st.builds(ScaleDown, _AFTER, _ENGINE)),
    (2, st.builds(RestartGateway, _AFTER, st.booleans(), st.sampled_from((0.1, 2.0, 6.0)))),
    (1, st.builds(RelayDies, _AFTER)),
]


def _steps(push: st.SearchStrategy[Step]) -> st.SearchStrategy[list[Step]]:
    shares = [(6, push), *_OTHERS]
    step = st.sampled_from([step for share, step in shares for _ in range(share)]).flatmap(lambda step: step)
    return st.lists(step, min_size=3, max_size=MOST_STEPS)


@dataclass
class Tally:
    """The work of a search."""

    stories: int = 0
    pushes: int = 0
    failed: int = 0
    delivered: int = 0


def search(examples: int, *, seed: int, shrinks: bool = True, staged: bool = False) -> Tally:
    """Play so many stories; raise the first that breaks a promise, as short as it can be made where `shrinks`. Where
    `staged`, all pushes are whole and staged, and half of them are refused."""
    tally = Tally()

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,  # a busy machine breaks no promise
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(
        steps=_steps(_STAGED_PUSH if staged else _PUSH),
        chance=st.integers(0, 1 << 16),
        relay=_NO if staged else st.booleans(),
        replicas=st.integers(1, 3),
        stages=st.just(True) if staged else st.booleans(),
    )
    def play(steps: list[Step], chance: int, relay: bool, replicas: int, stages: bool) -> None:
        played(steps, chance, tally, relay=relay, replicas=replicas, stages=stages)

    play()
    return tally


def played(steps: list[Step], chance: int, tally: Tally, *, relay: bool, replicas: int, stages: bool = False) -> None:
    """Play one story in a world of its own; `chance` is the seed of its latencies."""

    async def main() -> None:
        with tempfile.TemporaryDirectory(dir=_FOLDER, prefix="story-") as folder:
            chosen: dict[str, Any] = {"relay": relay, "replicas": replicas, "stages": stages}
            async with world_of(Path(folder), chance, **chosen) as world:
                await asyncio.sleep(1.5)
                await Story(world).play(steps)
                tally.stories += 1
                tally.pushes += len(world.pushes)
                tally.failed += sum(push.failed for push in world.pushes)
                tally.delivered += world.delivered

    with capture_logs() as logs:
        try:
            virtual_time.run(main)
        except BaseException:
            show = note if currently_in_test_context() else print
            for line in logs[-_KEPT_LINES:]:
                show(str(line))
            raise


if __name__ == "__main__":
    began = time.monotonic()
    print(search(int(sys.argv[1]), seed=int(sys.argv[2])), f"in {time.monotonic() - began:.0f} s")
