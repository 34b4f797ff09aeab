"""The fraud transformer: a causal transformer over one card's transactions, one probability a transaction.

Its own log-odds and those of gradient boosting (steps/fraud/data/boosting.py), which is one of its inputs, are averaged
by a weight that it computes for each transaction: two judges that err differently are better than either.

Each layer looks back over at most `model.window` transactions, so a score depends on the newest
`layers * (window - 1) + 1` transactions and on nothing else: the same whether the history is cut short after that,
comes alone (a server) or in a long run of rows (an evaluation). Identities of cards and terminals are no inputs.
The weights carry the names, means and spreads of their inputs, so `model.safetensors` explains itself.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as fn
from pydantic import ValidationError
from torch import Tensor, nn

from rekindle.errors import DataError
from steps.fraud.config import Model
from steps.fraud.data.boosting import BOOSTED

RARE = -5.0  # first guess of the logit: fraud is rare
CLIP = 8.0  # spreads; heavier tails than that teach nothing


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals: [B, L, width] → [B, L, width]."""

    def __init__(self, section: Model) -> None:
        super().__init__()
        width, self.heads = section.width, section.heads
        self.norm_attention, self.norm_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, section.hidden), nn.Linear(section.hidden, width)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor, mask: Tensor, last: Tensor | None = None) -> Tensor:
        """`mask` [L, L] is added to the attention logits. With `last` [B], at these positions only: [B, 1, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if last is not None:
            row = torch.arange(batch)
            x, query, mask = x[row, last, None], query[row, :, last, None], mask[last, None, None]
        seen = fn.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.dropout(self.project(seen.transpose(1, 2).reshape(batch, -1, width)))
        return x + self.dropout(self.back(fn.gelu(self.hidden(self.norm_hidden(x)))))


class FraudModel(nn.Module):
    """Features [B, L, F] of consecutive transactions of one card each → logits [B, L], causal."""

    names: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, section: Model, names: list[str], mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.window = section.window
        self.reach = section.reach
        self.register_buffer("names", torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8))
        self.register_buffer("mean", mean.float())
        self.register_buffer("spread", spread.float())
        self.embed = nn.Linear(len(names), section.width)
        self.blocks = nn.ModuleList(Block(section) for _ in range(section.layers))
        self.norm, self.head = nn.LayerNorm(section.width), nn.Linear(section.width, 2)
        self.boosted = names.index(BOOSTED)
        nn.init.zeros_(self.head.weight)  # an untrained model is as good as the trees
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([RARE, 0]))

    @property
    def feature_names(self) -> list[str]:
        """What the model wants in its last dimension, in this order."""
        return bytes(self.names.tolist()).decode().split("\n")

    def forward(self, features: Tensor) -> Tensor:
        return self.judge(features)[0]

    def judge(self, features: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The logits, and those of the transformer alone, [B, L] each; with `last` [B], at these positions: [B, 1]."""
        x = self.embed(((features - self.mean) / self.spread).clamp(-CLIP, CLIP))
        place = torch.arange(features.shape[1], device=features.device)
        distance = place[:, None] - place[None, :]
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(distance.shape, device=features.device).masked_fill(hidden, -torch.inf)
        *lower, top = self.blocks
        for block in lower:
            x = block(x, mask)
        own, weight = self.head(self.norm(top(x, mask, last))).unbind(-1)
        boosted = features[..., self.boosted]
        if last is not None:
            boosted = boosted.gather(1, last[:, None])
        return torch.lerp(boosted, own, weight.sigmoid()), own


def build(section: Model, facts: dict[str, Any]) -> FraudModel:
    """A fresh model for the dataset of `facts` (keys `features`, `mean`, `std`)."""
    spread = torch.tensor(facts["std"]).clamp(min=1e-6)  # a feature that never varies says nothing
    return FraudModel(section, facts["features"], torch.tensor(facts["mean"]), spread)


def load(folder: Path) -> FraudModel:
    """The trained model in `folder` (`model.safetensors`, `model.json`), ready to score. Raises DataError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        section = Model.model_validate(json.loads((folder / "model.json").read_text())["model"])
        tensors = load_file(folder / "model.safetensors")
        names = bytes(tensors["names"].tolist()).decode().split("\n")
        model = FraudModel(section, names, tensors["mean"], tensors["spread"])
        model.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, ValidationError) as error:
        raise DataError(f"{folder} holds no model of this workload ({type(error).__name__}: {error}).") from error
    return model.eval()


def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Mean cross entropy over the counted positions; batch = (features [B, L, F], labels [B, L], counted [B, L]).

    The transformer must know the answer by itself, too, or it would leave what is easy to the trees.
    """
    features, labels, counted = batch
    labels = labels.to(features.dtype)
    losses = sum(
        fn.binary_cross_entropy_with_logits(logits, labels, reduction="none") for logits in model.judge(features)
    )
    return (losses / 2 * counted).sum() / counted.sum().clamp(min=1)


@torch.inference_mode()
def score_all(model: FraudModel, features: Tensor) -> Tensor:
    """Probability of fraud at every position: [B, L, F] → float64 [B, L]."""
    return model(features).double().sigmoid()


@torch.inference_mode()
def score_windows(model: FraudModel, features: Tensor, lengths: Tensor) -> Tensor:
    """Probability of fraud of the last transaction of each history: [B, L, F], lengths [B] (≥ 1) → float64 [B].

    Histories start at position 0; what follows position `lengths - 1` is padding and has no influence. Neither has
    the place in the batch, bit for bit, if B is 8 and the model not too narrow (see scoring.py): a sigmoid over all
    positions would have a tail of other bits.
    """
    return model.judge(features, lengths - 1)[0].squeeze(1).double().sigmoid()
