"""Which GPUs a replica has, by UUID."""

import pytest

from engines.gpus import chosen, visible_gpus

LISTED = "0, GPU-aaa\n1, GPU-bbb\n2, GPU-ccc\n"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("GPU-aaa", "GPU-bbb", "GPU-ccc")),
        ("1", ("GPU-bbb",)),
        ("2,0", ("GPU-ccc", "GPU-aaa")),
        ("GPU-bbb", ("GPU-bbb",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_they_are_those_that_the_environment_leaves(visible: str | None, expected: tuple[str, ...]) -> None:
    assert chosen(LISTED, visible) == expected


async def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert await visible_gpus(None) == ()
