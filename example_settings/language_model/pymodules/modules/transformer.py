"""A decoder: blocks of causal attention and a feed-forward net, each normalised before and added after."""

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.components import parameters

NUM_CHARACTERS = 96


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, context, width = x.shape
        heads = self.queries_keys_values(self.norm1(x)).view(batch, context, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, context, width, num_heads, num_blocks):
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, characters):
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.positions(positions)
        # The embedding serves twice: its transpose turns what the blocks return into scores.
        return self.norm(self.blocks(x)) @ self.characters.weight.T


module = Transformer(parameters.context, **parameters.model)
