"""The two families of fraud models: a causal transformer over the transactions of a card, and
boosted trees.

Both families predict a probability of fraud for each transaction. The trees
(steps/fraud/data/boosting.py) are fitted by `prepare`, which stores their log-odds as a feature of
each transaction; the transformer gets this feature, too.

Each layer of the transformer attends to at most `model.window` transactions, so a score depends
only on the newest `layers * (window - 1) + 1` transactions. Earlier history does not affect it, so
a server, which scores one history, and an evaluation, which scores long sequences, compute the same
score. Ids of cards and terminals are not inputs. `model.safetensors` includes the names, means and
standard deviations of the inputs.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as fn
from pydantic import ValidationError
from torch import Tensor, nn

from rekindle.content.weights import WEIGHTS_FILE, read_description
from rekindle.errors import DataError
from steps.fraud.data.boosting import BOOSTED
from steps.fraud.fraud_config import Model

INITIAL_LOGIT = -5.0  # initial log-odds of fraud; low, because fraud is rare
CLIP = 8.0  # limit of the absolute value of standardized inputs


class Block(nn.Module):
    """Transformer block with pre-norm attention and feed-forward layers and residual connections:
    [B, L, width] → [B, L, width]."""

    def __init__(self, section: Model) -> None:
        super().__init__()
        width = section.width
        self.heads = section.heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_hidden = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.hidden = nn.Linear(width, section.hidden)
        self.back = nn.Linear(section.hidden, width)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor, mask: Tensor, last: Tensor | None = None) -> Tensor:
        """Add `mask` [L, L] to the attention logits. If `last` [B] is given, return only the
        outputs at the positions `last`: [B, 1, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)

        if last is not None:
            row = torch.arange(batch)
            x = x[row, last, None]
            query = query[row, :, last, None]
            mask = mask[last, None, None]

        attended = fn.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, -1, width)))
        return x + self.dropout(self.back(fn.gelu(self.hidden(self.norm_hidden(x)))))


class Inputs(nn.Module):
    """The names, means and standard deviations of the inputs, as part of the weights."""

    names: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, names: list[str], mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer(
            "names", torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)
        )
        self.register_buffer("mean", mean.float())
        self.register_buffer("spread", spread.float())

    @property
    def feature_names(self) -> list[str]:
        """Names of the input features, in the order of the last dimension."""
        return bytes(self.names.tolist()).decode().split("\n")


class TreesModel(Inputs):
    """Returns the log-odds of the boosted trees [B, L], which are one of the features [B, L, F]."""

    reach = 0
    width = 0

    def __init__(self, section: Model, names: list[str], mean: Tensor, spread: Tensor) -> None:
        super().__init__(names, mean, spread)
        self.boosted = names.index(BOOSTED)

    def forward(self, features: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the log-odds [B, L], or, if `last` [B] is given, only those at the positions
        `last`: [B, 1]."""
        boosted = features[..., self.boosted]
        if last is None:
            return boosted
        return boosted.gather(1, last[:, None])


class FraudModel(Inputs):
    """Causal transformer: features [B, L, F], each row with consecutive transactions of one card →
    log-odds of fraud [B, L]."""

    def __init__(self, section: Model, names: list[str], mean: Tensor, spread: Tensor) -> None:
        super().__init__(names, mean, spread)
        self.window = section.window
        self.reach = section.reach
        self.width = section.width
        self.embed = nn.Linear(len(names), section.width)
        self.blocks = nn.ModuleList(Block(section) for _ in range(section.layers))
        self.norm = nn.LayerNorm(section.width)
        self.head = nn.Linear(section.width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, INITIAL_LOGIT)

    def forward(self, features: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the log-odds [B, L]; with `last` [B], at these positions: [B, 1]."""
        x = self.embed(((features - self.mean) / self.spread).clamp(-CLIP, CLIP))
        position = torch.arange(features.shape[1], device=features.device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(distance.shape, device=features.device).masked_fill(hidden, -torch.inf)
        *lower, top = self.blocks
        for block in lower:
            x = block(x, mask)
        return self.head(self.norm(top(x, mask, last))).squeeze(-1)


FAMILIES: dict[str, type[TreesModel | FraudModel]] = {
    "trees": TreesModel,
    "transformer": FraudModel,
}


def build(family: str, section: Model, facts: dict[str, Any]) -> TreesModel | FraudModel:
    """Build an untrained model for a dataset with `facts` (keys `features`, `mean`, `std`)."""
    spread = torch.tensor(facts["std"]).clamp(min=1e-6)  # avoids division by 0
    return FAMILIES[family](section, facts["features"], torch.tensor(facts["mean"]), spread)


def load(folder: Path) -> TreesModel | FraudModel:
    """Load the trained model in `folder` (`model.safetensors`, `model.json`) for scoring. Raises
    DataError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        description = read_description(folder)
        section = Model.model_validate(description.model)
        tensors = load_file(folder / WEIGHTS_FILE)
        names = bytes(tensors["names"].tolist()).decode().split("\n")
        model = FAMILIES[description.family](section, names, tensors["mean"], tensors["spread"])
        model.load_state_dict(tensors)
    except (
        DataError,
        OSError,
        KeyError,
        ValueError,
        RuntimeError,
        SafetensorError,
        ValidationError,
    ) as error:
        raise DataError(
            f"{folder} is not a model of this workload ({type(error).__name__}: {error})."
        ) from error

    return model.eval()


def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy over the positions that `counted` marks; the batch is (features
    [B, L, F], labels [B, L], counted [B, L])."""
    features, labels, counted = batch
    losses = fn.binary_cross_entropy_with_logits(
        model(features), labels.to(features.dtype), reduction="none"
    )
    return (losses * counted).sum() / counted.sum().clamp(min=1)


@torch.inference_mode()
def score_all(model: nn.Module, features: Tensor) -> Tensor:
    """Return the probability of fraud at every position: features [B, L, F] → float64 [B, L]."""
    return model(features).double().sigmoid()


@torch.inference_mode()
def score_windows(model: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
    """Return the probability of fraud of the last row of each history: features [B, L, F], lengths
    [B] (≥ 1) → float64 [B].

    Histories start at position 0; padding after position `lengths - 1` is ignored. If B is 8 and
    the model is wide enough (MIN_BATCH_WIDTH in scoring.py), the bits of a score do not depend on
    the position in the batch. To ensure this, the sigmoid is applied to the last positions only.
    Over all positions, its vectorized loop would compute the remainder differently.
    """
    return model(features, lengths - 1).squeeze(1).double().sigmoid()
