"""Model folders without weights, for speed tests of engines with random weights.

python -m loadtests.shapes qwen2-7b /tmp/qwen2-7b     # then serve it with engine.load_format=dummy
"""

import argparse
import json
import string
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

_END = "<|endoftext|>"

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "use_cache": True,
    "use_sliding_window": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": {
        **_QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "qwen2-0.5b": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}


def write_model(shape: str, folder: Path) -> None:
    """Write configuration and tokenizer of the shape, without weights."""
    config = SHAPES[shape]
    end = config["vocab_size"] - 1
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": {**config, "bos_token_id": end, "eos_token_id": end},
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        "tokenizer.json": tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _END,
            "pad_token": _END,
            "chat_template": _CHAT_TEMPLATE,
            "model_max_length": config["max_position_embeddings"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level tokenizer of full size: random weights sample every id, and each needs a text."""
    letters = _byte_letters()
    words = ("Ġ" + "".join(word) for word in product(string.ascii_lowercase, repeat=4))
    tokens = [*letters, *islice(words, vocab_size - len(letters) - 1), _END]
    end = {"id": vocab_size - 1, "content": _END, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [end | plain],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }


def _byte_letters() -> list[str]:
    """Return the 256 letters for bytes in byte-level tokenizers: printable bytes as themselves, others from 256."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte) for byte in own] + [chr(256 + index) for index in range(len(others))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.shapes", description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    write_model(args.shape, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
