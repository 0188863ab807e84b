"""The content of an adapter's folder, and folders that are refused before an engine sees them."""

import json
from pathlib import Path

import pytest

from engines.checkpoint.adapter import CONFIG_NAME, WEIGHTS_NAME, read_adapter
from engines.errors import InvalidRequest
from engines.types import TensorMeta
from tests.material.adapters import write_adapter


def test_the_rank_is_the_largest_of_any_module(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "v1", rank=8)
    assert read_adapter(folder).rank == 8
    config = json.loads((folder / CONFIG_NAME).read_text()) | {"rank_pattern": {"q_proj": 32}}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    assert read_adapter(folder).rank == 32


@pytest.mark.parametrize("missing", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_folder_without_one_of_its_files_is_refused_by_the_files_name(tmp_path: Path, missing: str) -> None:
    folder = write_adapter(tmp_path / "v1")
    (folder / missing).unlink()
    with pytest.raises(InvalidRequest, match=f"has no {missing}"):
        read_adapter(folder)


def test_a_path_that_is_relative_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="a relative path"):
        read_adapter(Path("v1"))
    with pytest.raises(InvalidRequest, match="does not exist here"):
        read_adapter(tmp_path / "v1")


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"r": 0}', '{"r": 8, "rank_pattern": {"q_proj": "x"}}'])
def test_a_config_without_a_rank_is_refused(tmp_path: Path, config: str) -> None:
    folder = write_adapter(tmp_path / "v1")
    (folder / CONFIG_NAME).write_text(config)
    with pytest.raises(InvalidRequest, match=CONFIG_NAME):
        read_adapter(folder)


def test_an_adapter_fits_the_model_whose_modules_have_its_sizes(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path / "v1", sizes=(4, 6), module="mlp.up_proj"))
    name = "model.layers.0.mlp.up_proj.weight"
    found.check_fits([TensorMeta(name=name, dtype="float32", shape=(6, 4))])
    found.check_fits([TensorMeta(name="model.norm.weight", dtype="float32", shape=(4,))])
    for shape in ((6, 5), (7, 4)):
        with pytest.raises(InvalidRequest, match=r"does not fit model\.layers\.0\.mlp\.up_proj of the served model"):
            found.check_fits([TensorMeta(name=name, dtype="float32", shape=shape)])
