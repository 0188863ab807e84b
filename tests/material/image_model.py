"""A small model that reads images (Idefics3, which needs no torchvision), with random weights."""

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlamaConfig,
)

from examples.tiny_model.train import make_tokenizer

_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
_SIDE = 28
"""Pixels of the only size of images: two patches wide and high."""


def save(folder: Path, *, seed: int) -> None:
    """Write a checkpoint with weights drawn from `seed`, its tokenizer and its image processor."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in _TOKENS])
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": _SIDE, "patch_size": 14,
    }  # fmt: skip
    config = Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # large, so that what it says depends on the image
    model.save_pretrained(folder)
    images = Idefics3ImageProcessor(
        do_image_splitting=False, size={"longest_edge": _SIDE}, max_image_size={"longest_edge": _SIDE}
    )
    Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=1, chat_template=_CHAT
    ).save_pretrained(folder)
