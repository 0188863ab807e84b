"""The tiny model with a head that shares its embedding's weights: what a vLLM on CPU serves stale unless told anew."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model.task import COMMITTED


def save(folder: Path, seed: int) -> Any:
    """A model in float32 with weights drawn from `seed`, written to `folder` as a checkpoint with its tokenizer."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(COMMITTED, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(COMMITTED).save_pretrained(folder)
    return model
