"""Model folders for engines with random weights."""

import json
import math
from pathlib import Path

import pytest

from engines.checkpoint.folder import read_tensors
from loadtests.shapes import SHAPES, write_model


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_has_a_text_for_every_id_and_as_many_elements_as_the_model(shape: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write_model(shape, tmp_path, layers=2)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config.vocab_size))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    told = {one.name: one.shape for one in read_tensors(tmp_path) or ()}
    held = {name: tuple(one.shape) for name, one in model.named_parameters()}
    assert sum(map(math.prod, told.values())) == sum(map(math.prod, held.values()))
    plain = {name: size for name, size in held.items() if ".experts." not in name}
    assert {name: told[name] for name in plain} == plain


def test_a_checkpoint_of_headers_takes_no_room(tmp_path: Path) -> None:
    write_model("qwen3-30b-a3b", tmp_path, layers=12)
    file = (tmp_path / "model.safetensors").stat()
    assert file.st_size > 16e9
    assert file.st_blocks * 512 < 4e6
    assert len(read_tensors(tmp_path) or ()) == 12 * (9 + 3 * 128) + 3
