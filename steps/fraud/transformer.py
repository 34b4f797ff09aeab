"""The fraud transformer: a causal transformer over the transactions of a card, with one probability per transaction.

One of its inputs is the result of gradient boosting (steps/fraud/data/boosting.py). The output is a weighted average of
the transformer's own log-odds and the boosted log-odds; the transformer computes the weight for each transaction. If
single transactions show all frauds, the average is as good as the trees, which the transformer alone is not; if frauds
show mainly in the sequence of a card, it is better than the trees (docs/figures.md).

Each layer attends to at most `model.window` transactions, so a score depends only on the newest `layers * (window - 1)
+ 1` transactions. A score does not change if the history before them is cut off, and is the same in a server, which
scores one history, and in an evaluation, which scores long runs of rows. Ids of cards and terminals are not inputs.
`model.safetensors` includes the names, means and standard deviations of the inputs.
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

INITIAL_LOGIT = -5.0  # fraud is rare
CLIP = 8.0  # limit of standardized inputs; heavier tails do not help


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
        """Add `mask` [L, L] to the attention logits. With `last` [B], compute these positions only: [B, 1, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if last is not None:
            row = torch.arange(batch)
            x, query, mask = x[row, last, None], query[row, :, last, None], mask[last, None, None]
        attended = fn.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, -1, width)))
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
            self.head.bias.copy_(torch.tensor([INITIAL_LOGIT, 0]))

    @property
    def feature_names(self) -> list[str]:
        """Names of the input features, in the order of the last dimension."""
        return bytes(self.names.tolist()).decode().split("\n")

    def forward(self, features: Tensor) -> Tensor:
        return self.logits(features)[0]

    def logits(self, features: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the averaged and the transformer's own logits, [B, L]; with `last` [B], at these positions: [B, 1]."""
        x = self.embed(((features - self.mean) / self.spread).clamp(-CLIP, CLIP))
        position = torch.arange(features.shape[1], device=features.device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(distance.shape, device=features.device).masked_fill(hidden, -torch.inf)
        *lower, top = self.blocks
        for block in lower:
            x = block(x, mask)
        transformer, weight = self.head(self.norm(top(x, mask, last))).unbind(-1)
        boosted = features[..., self.boosted]
        if last is not None:
            boosted = boosted.gather(1, last[:, None])
        return torch.lerp(boosted, transformer, weight.sigmoid()), transformer


def build(section: Model, facts: dict[str, Any]) -> FraudModel:
    """Build an untrained model for a dataset with `facts` (keys `features`, `mean`, `std`)."""
    spread = torch.tensor(facts["std"]).clamp(min=1e-6)  # for constant features
    return FraudModel(section, facts["features"], torch.tensor(facts["mean"]), spread)


def load(folder: Path) -> FraudModel:
    """Load the trained model in `folder` (`model.safetensors`, `model.json`) for scoring. Raises DataError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        section = Model.model_validate(json.loads((folder / "model.json").read_text())["model"])
        tensors = load_file(folder / "model.safetensors")
        names = bytes(tensors["names"].tolist()).decode().split("\n")
        model = FraudModel(section, names, tensors["mean"], tensors["spread"])
        model.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, ValidationError) as error:
        raise DataError(f"{folder} is not a model of this workload ({type(error).__name__}: {error}).") from error
    return model.eval()


def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy over the counted positions; batch = (features [B, L, F], labels, counted [B, L]).

    The loss includes the transformer's own logits: otherwise it would leave the easy cases to the trees.
    """
    features, labels, counted = batch
    labels = labels.to(features.dtype)
    losses = sum(
        fn.binary_cross_entropy_with_logits(logits, labels, reduction="none") for logits in model.logits(features)
    )
    return (losses / 2 * counted).sum() / counted.sum().clamp(min=1)


@torch.inference_mode()
def score_all(model: FraudModel, features: Tensor) -> Tensor:
    """Return the probability of fraud at every position: [B, L, F] → float64 [B, L]."""
    return model(features).double().sigmoid()


@torch.inference_mode()
def score_windows(model: FraudModel, features: Tensor, lengths: Tensor) -> Tensor:
    """Return the probability of fraud of the last row of each history: [B, L, F], lengths [B] (≥ 1) → float64 [B].

    Histories start at position 0; padding after position `lengths - 1` is ignored. If B is 8 and the model not too
    narrow (see scoring.py), the bits do not depend on the position in the batch. For that, the sigmoid is applied to
    the last positions only: over all positions, the remainder of its vector loop would give other bits.
    """
    return model.logits(features, lengths - 1)[0].squeeze(1).double().sigmoid()
