"""Model folders without weights, for speed tests of engines with random weights.

    python -m loadtests.shapes qwen2-7b /tmp/qwen2-7b     # then serve it with engine.load_format=dummy
    python -m loadtests.shapes qwen3-30b-a3b /tmp/moe --layers 12

Their checkpoint has the headers of its tensors, from which a trainer learns what to send, over a file without content.
"""

import argparse
import json
import math
import string
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
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


def write_model(shape: str, folder: Path, layers: int | None = None) -> None:
    """Configuration, tokenizer and headers of the shape, with fewer layers where asked; no weights."""
    config = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
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
    _write_headers(folder / "model.safetensors", dict(_tensors(config)))


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as the checkpoint has them."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _layer_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if not experts:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if experts:
        yield from (("self_attn.q_norm.weight", (head,)), ("self_attn.k_norm.weight", (head,)))
        yield "mlp.gate.weight", (experts, hidden)
    width = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for block in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        yield f"{block}.gate_proj.weight", (width, hidden)
        yield f"{block}.up_proj.weight", (width, hidden)
        yield f"{block}.down_proj.weight", (hidden, width)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _write_headers(file: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of bf16 tensors whose content takes no room on the disk: it is a hole."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


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
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    args = parser.parse_args(argv)
    write_model(args.shape, args.folder, args.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
