"""Lines over time: where one is drawn."""

import re

from loadtests.report.charts import Line, chart


def polylines(drawn: str) -> list[list[str]]:
    return [points.split() for points in re.findall(r'<polyline[^>]* points="([^"]*)"', drawn)]


def test_a_line_ends_where_its_server_was_silent() -> None:
    points = [(0, 1.0), (1, 1.0), (30, 4.0), (31, 4.0), (60, 2.0)]
    assert [len(piece) for piece in Line("waiting", points, 0, gap_s=5).pieces()] == [2, 2, 1]
    pieces = polylines(chart([Line("waiting", points, 0, gap_s=5)], 60))
    assert [len(set(piece)) for piece in pieces] == [2, 2, 1]
    assert all(len(piece) >= 2 for piece in pieces), "a line of one point shows nothing"


def test_a_line_without_a_limit_is_whole() -> None:
    assert len(polylines(chart([Line("makespan", [(0, 1.0), (50, 2.0)], 0)], 60))) == 1
