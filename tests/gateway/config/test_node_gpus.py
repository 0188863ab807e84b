"""--gpus: which ids are taken, and which are refused before anything starts."""

from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.config.node_gpus import read_gpus

NOWHERE = Path("/nonexistent")


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """That of a machine with four GPUs."""
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize("text", ["0", "0,1,2,3", " 3, 1 ", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"])
def test_numbers_and_uuids_are_taken_in_their_order(driver: Path, text: str) -> None:
    assert read_gpus(text, {}, driver) == tuple(part.strip() for part in text.split(","))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is no GPU: give numbers or UUIDs"),
        ("0,,1", "'' is no GPU"),
        ("0-3", "'0-3' is no GPU"),
        ("all", "'all' is no GPU"),
        ("1,0,1", "1 is given twice"),
        ("2,4", "this machine has 4 GPUs, 0 to 3, and no 4"),
    ],
)
def test_what_is_no_gpu_of_this_machine_is_named(driver: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        read_gpus(text, {}, driver)
    assert f"--gpus {text}" in str(refused.value)


def test_a_gpu_outside_what_a_batch_system_gave_is_refused() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert read_gpus("5", environ, NOWHERE) == ("5",)
    with pytest.raises(ConfigError, match="0 is not in CUDA_VISIBLE_DEVICES=4,5"):
        read_gpus("0,4", environ, NOWHERE)
