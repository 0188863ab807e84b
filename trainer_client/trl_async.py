"""TRL's AsyncGRPOTrainer without CUDA: weights over gloo, and attention in plain torch.

Call `install()` before the trainer is made; with CUDA it does nothing.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.errors import ConfigError
from engines.transfer.gloo import TIMEOUT_S
from trainer_client.trl import Endpoint, send_packed


def install(timeout_s: float = TIMEOUT_S) -> None:
    """Make the trainer sync over gloo, unless CUDA is available. `timeout_s` limits each wait of a sync.

    Adapters need no group: they are sent as with CUDA.
    """
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing, weight_transfer  # warns: experimental

    weight_transfer.open_trainer_endpoint = lambda init_info: open_endpoint(init_info, timeout_s)
    weight_transfer.packed_nccl_broadcast_producer = send_packed
    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None  # TRL asks CUDA for its name


def open_endpoint(init_info: dict[str, Any], timeout_s: float) -> Endpoint:
    """Join the engines as rank 0, in place of vLLM's `trainer_init`."""
    group = Endpoint(init_info["master_address"], init_info["master_port"], 0, init_info["world_size"], timeout_s)
    group.join()
    return group


class TorchAttention:
    """FlashAttention's function for packed sequences, with TRL's arguments. Slow, but for any device."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        max_query: int,
        max_key: int,
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attend within segments. query is [tokens, heads, size], key and value [path tokens, key heads, size];
        `*_ends` start with 0.

        A segment's last query is aligned with its last key, so that it sees the whole path before it.
        """
        if not causal or softcap or window_size[0] >= 0:
            raise ConfigError(
                f"causal = {causal}, softcap = {softcap}, window_size = {window_size}: models with these train on CUDA"
            )
        queries, keys = query_ends.tolist(), key_ends.tolist()
        outputs = []
        for first, last, first_key, last_key in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
            parts = query[first:last], key[first_key:last_key], value[first_key:last_key]
            rows, columns = (torch.arange(len(part), device=query.device) for part in parts[:2])
            seen = columns <= rows.unsqueeze(1) + len(columns) - len(rows)
            q, k, v = (part.transpose(0, 1) for part in parts)
            made = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
            outputs.append(made.transpose(0, 1))
        return torch.cat(outputs)
