"""The network of steps.language: a decoder-only transformer over bytes."""

import torch.nn.functional as fn
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """Transformer block with pre-norm causal attention and feed-forward layers and residual
    connections, which maps [B, L, width] to [B, L, width]."""

    def __init__(self, hidden_width: int, head_count: int) -> None:
        super().__init__()
        self.heads = head_count
        self.norm_attention = nn.LayerNorm(hidden_width)
        self.norm_hidden = nn.LayerNorm(hidden_width)
        self.qkv = nn.Linear(hidden_width, 3 * hidden_width)
        self.project = nn.Linear(hidden_width, hidden_width)
        self.hidden = nn.Sequential(
            nn.Linear(hidden_width, 4 * hidden_width),
            nn.GELU(),
            nn.Linear(4 * hidden_width, hidden_width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended_values = fn.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended_values.transpose(1, 2).reshape(batch, length, width))
        return x + self.hidden(self.norm_hidden(x))


class GPT(nn.Module):
    """A byte-level GPT, which maps bytes [B, L], with L ≤ window, to logits of the next byte [B, L,
    256]."""

    def __init__(
        self, window_bytes: int, hidden_width: int, layer_count: int, head_count: int
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, hidden_width)
        self.places = nn.Embedding(window_bytes, hidden_width)
        self.blocks = nn.Sequential(*(Block(hidden_width, head_count) for _ in range(layer_count)))
        self.norm = nn.LayerNorm(hidden_width)
        self.head = nn.Linear(hidden_width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))
