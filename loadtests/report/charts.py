"""Line charts over time as inline SVG, with a band for each phase."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 12, 28
_TICKS = 4
_TIME_STEPS_S = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200)
_MOST_TIMES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """Points of (seconds since the start, value), joined where they are at most `gap_s` apart. `style` is the number
    of a page colour."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    gap_s: float = math.inf

    def pieces(self) -> list[list[tuple[float, float]]]:
        """Return the points of each stretch without a gap."""
        found: list[list[tuple[float, float]]] = []
        for point in self.points:
            if found and point[0] - found[-1][-1][0] <= self.gap_s:
                found[-1].append(point)
            else:
                found.append([point])
        return found


@dataclass(frozen=True, slots=True)
class Band:
    """A named stretch of time."""

    name: str
    began: float
    ended: float


def chart(lines: Sequence[Line], seconds: float, bands: Sequence[Band] = (), marks: Sequence[float] = ()) -> str:
    """Draw all lines on one scale from zero; `marks` are moments, such as weight updates."""
    top = _round_up(max((value for line in lines for _, value in line.points), default=0.0))
    seconds = max(seconds, 1e-9)

    def x(second: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(max(second / seconds, 0.0), 1.0)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for index, band in enumerate(bands):
        left, right = x(band.began), x(band.ended)
        parts.append(
            f'<rect class="band{index % 2}" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"/>'
            f'<text class="band" x="{(left + right) / 2:.1f}" y="{_TOP + 12}">{escape(band.name)}</text>'
        )
    for value in (top * tick / _TICKS for tick in range(_TICKS + 1)):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="left" x="{_LEFT - 6}" y="{y(value) + 4:.1f}">{short(value)}</text>'
        )
    for second in _times(seconds):
        parts.append(f'<text class="below" x="{x(second):.1f}" y="{_HEIGHT - 8}">{_told(second)}</text>')
    for mark in marks:
        parts.append(f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for line in lines:
        for piece in line.pieces():
            shown = piece if len(piece) > 1 else 2 * piece  # a line of one point shows nothing
            places = " ".join(f"{x(second):.1f},{y(value):.1f}" for second, value in shown)
            parts.append(
                f'<polyline class="line{line.style}" points="{places}"><title>{escape(line.name)}</title></polyline>'
            )
    return "".join([*parts, "</svg>"])


def _times(seconds: float) -> list[float]:
    """Return round times as labels of the time axis."""
    step = next((step for step in _TIME_STEPS_S if seconds / step <= _MOST_TIMES), seconds / _MOST_TIMES)
    return [index * step for index in range(int(seconds / step) + 1)]


def _told(second: float) -> str:
    if second < 120:
        return f"{second:g} s"
    return f"{second / 60:.3g} min" if second < 7200 else f"{second / 3600:.3g} h"


def short(value: float) -> str:
    """Format a number with three digits."""
    if value >= 1_000_000:
        return f"{value / 1_000_000:.3g}M"
    if value >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _round_up(value: float) -> float:
    """Return the end of the scale: the next of 1, 2, 2.5, 4, 5 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if value <= step * power * (1 + 1e-9))
