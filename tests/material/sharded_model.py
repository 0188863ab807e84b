"""The model that the ranks of trainer_rank.py shard and push, for test_sharded_models.py."""

import torch
from torch import nn

SHAPES = {
    "embed.weight": [7, 4],
    "layers.0.weight": [6, 4],
    "layers.0.bias": [6],
    "layers.1.weight": [4, 6],
    "layers.1.bias": [4],
}
"""What a checkpoint of the model has: the head is tied to the embedding, and the buffer is not in it."""
WORLD_SIZE = 2


class Model(nn.Module):
    """Odd sizes, so that ranks hold unequal parts, and one none."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(token_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
