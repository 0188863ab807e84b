"""The cost of an engine's decode step beside that of reading a prompt, learned from the counters of its page."""

import math
from collections import deque

from gateway.fleet.watch.engine_page import EngineWork

# A GPU reads about so many tokens in the time of a step: its arithmetic over its memory's bandwidth. It counts as a
# part of a look, and so decides where looks are too much alike to tell either cost.
_ASSUMED, _ASSUMED_LOOKS = 250.0, 0.05
_LOOKS = 50
# Less time tells of single prompts, and more may have parts in which the engine was idle.
_SHORTEST_S, _LONGEST_S = 5.0, 60.0


class Pace:
    """`step_tokens` are the prompt tokens that the engine reads in the time of a decode step; infinite before it is
    known.

    The seconds between two looks are those of reading and those of steps. Least squares over the last looks tell the
    cost of either.
    """

    def __init__(self) -> None:
        self.step_tokens = math.inf
        self._last: tuple[float, EngineWork] | None = None
        self._looks: deque[tuple[float, float]] = deque(maxlen=_LOOKS)

    def see(self, at: float, work: EngineWork) -> None:
        """Take the counters at a time in seconds."""
        before_at, before = self._last or (at, work)
        seconds, read, steps = at - before_at, work.read - before.read, work.steps - before.steps
        if self._last is not None and seconds < _SHORTEST_S:
            return
        self._last = at, work
        is_busy = seconds <= _LONGEST_S and min(before.running, work.running) >= 1
        if is_busy and read >= 0 and steps > 0:  # the counters of a new process begin again
            self._looks.append((read / seconds, steps / seconds))
            self.step_tokens = self._solved()

    def _solved(self) -> float:
        """The seconds of a step over those of a token, which together make each second of a look."""
        reads, steps = (sum(look[part] for look in self._looks) for part in (0, 1))
        if not reads:
            return math.inf
        least = min(sum(step * step for _, step in self._looks), sum((read / _ASSUMED) ** 2 for read, _ in self._looks))
        weight = math.sqrt(_ASSUMED_LOOKS * least / len(self._looks))
        rows = [*self._looks, (weight * _ASSUMED, -weight)]  # the last has no seconds: a step costs what it assumes
        read_read = sum(read * read for read, _ in rows)
        read_step = sum(read * step for read, step in rows)
        step_step = sum(step * step for _, step in rows)
        # By Cramer's rule, both times the determinant.
        token_s = reads * step_step - steps * read_step
        step_s = steps * read_read - reads * read_step
        return max(0.0, step_s) / token_s if token_s > 0 else math.inf
