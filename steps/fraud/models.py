"""The two families of fraud models: a causal transformer over the transactions of a card, and
boosted trees.

Both families predict a probability of fraud for each transaction. The trees
(steps/fraud/data/boosting.py) are fitted by `prepare`, which stores their log-odds as a feature of
each transaction; the transformer gets this feature, too.

Each layer of the transformer attends to at most `model.window` transactions, so a score depends
only on the newest `layers * (window - 1) + 1` transactions. Transactions before these do not affect
a score, so a server, which scores one history, and an evaluation, which scores long sequences,
compute the same score. Ids of cards and terminals are not inputs of the models. `model.safetensors`
includes the names, means and standard deviations of the inputs.
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

# initial log-odds of fraud, which are low, because fraud is rare
INITIAL_LOGIT = -5.0
# limit of the absolute value of standardized inputs
CLIP = 8.0


class Block(nn.Module):
    """Transformer block with pre-norm attention and feed-forward layers and residual connections,
    which maps [B, L, width] to [B, L, width]."""

    def __init__(self, model_section: Model) -> None:
        super().__init__()
        width = model_section.width
        self.heads = model_section.heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_hidden = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.hidden = nn.Linear(width, model_section.hidden)
        self.back = nn.Linear(model_section.hidden, width)
        self.dropout = nn.Dropout(model_section.dropout)

    def forward(
        self, x: Tensor, attention_mask: Tensor, last_positions: Tensor | None = None
    ) -> Tensor:
        """Add `attention_mask` [L, L] to the attention logits. If `last_positions` [B] is given,
        return only the outputs at these positions, with the shape [B, 1, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)

        if last_positions is not None:
            batch_indices = torch.arange(batch)
            x = x[batch_indices, last_positions, None]
            query = query[batch_indices, :, last_positions, None]
            attention_mask = attention_mask[last_positions, None, None]

        attended_values = fn.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask
        )
        x = x + self.dropout(
            self.project(attended_values.transpose(1, 2).reshape(batch, -1, width))
        )
        return x + self.dropout(self.back(fn.gelu(self.hidden(self.norm_hidden(x)))))


class Inputs(nn.Module):
    """The names, means and standard deviations of the inputs, as part of the weights."""

    names: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(
        self, input_names: list[str], input_means: Tensor, input_deviations: Tensor
    ) -> None:
        super().__init__()
        self.register_buffer(
            "names", torch.tensor(list("\n".join(input_names).encode()), dtype=torch.uint8)
        )
        self.register_buffer("mean", input_means.float())
        self.register_buffer("spread", input_deviations.float())

    @property
    def feature_names(self) -> list[str]:
        """Names of the input features, in the order of the last dimension."""
        return bytes(self.names.tolist()).decode().split("\n")


class TreesModel(Inputs):
    """Returns the log-odds of the boosted trees [B, L], which are one of the features [B, L, F]."""

    reach = 0
    width = 0

    def __init__(
        self,
        model_section: Model,
        input_names: list[str],
        input_means: Tensor,
        input_deviations: Tensor,
    ) -> None:
        super().__init__(input_names, input_means, input_deviations)
        self.boosted = input_names.index(BOOSTED)

    def forward(self, features: Tensor, last_positions: Tensor | None = None) -> Tensor:
        """Return the log-odds [B, L] or, if `last_positions` [B] is given, only the log-odds at
        these positions, with the shape [B, 1]."""
        boosted_log_odds = features[..., self.boosted]
        if last_positions is None:
            return boosted_log_odds
        return boosted_log_odds.gather(1, last_positions[:, None])


class FraudModel(Inputs):
    """Causal transformer: features [B, L, F], each row with consecutive transactions of one card →
    log-odds of fraud [B, L]."""

    def __init__(
        self,
        model_section: Model,
        input_names: list[str],
        input_means: Tensor,
        input_deviations: Tensor,
    ) -> None:
        super().__init__(input_names, input_means, input_deviations)
        self.window = model_section.window
        self.reach = model_section.reach
        self.width = model_section.width
        self.embed = nn.Linear(len(input_names), model_section.width)
        self.blocks = nn.ModuleList(Block(model_section) for _ in range(model_section.layers))
        self.norm = nn.LayerNorm(model_section.width)
        self.head = nn.Linear(model_section.width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, INITIAL_LOGIT)

    def forward(self, features: Tensor, last_positions: Tensor | None = None) -> Tensor:
        """Return the log-odds [B, L] or, if `last_positions` [B] is given, only the log-odds at
        these positions, with the shape [B, 1]."""
        x = self.embed(((features - self.mean) / self.spread).clamp(-CLIP, CLIP))
        row_positions = torch.arange(features.shape[1], device=features.device)
        row_distances = row_positions[:, None] - row_positions[None, :]
        is_hidden = (row_distances < 0) | (row_distances >= self.window)
        mask = torch.zeros(row_distances.shape, device=features.device).masked_fill(
            is_hidden, -torch.inf
        )
        *lower_blocks, top_block = self.blocks
        for block in lower_blocks:
            x = block(x, mask)
        return self.head(self.norm(top_block(x, mask, last_positions))).squeeze(-1)


FAMILIES: dict[str, type[TreesModel | FraudModel]] = {
    "trees": TreesModel,
    "transformer": FraudModel,
}


def build(
    family_name: str, model_section: Model, dataset_facts: dict[str, Any]
) -> TreesModel | FraudModel:
    """Build an untrained model for a dataset with `dataset_facts` (keys `features`, `mean`,
    `std`)."""
    # replace a standard deviation of 0, to avoid a division by 0
    input_deviations = torch.tensor(dataset_facts["std"]).clamp(min=1e-6)
    return FAMILIES[family_name](
        model_section,
        dataset_facts["features"],
        torch.tensor(dataset_facts["mean"]),
        input_deviations,
    )


def load(model_folder: Path) -> TreesModel | FraudModel:
    """Load the trained model in `model_folder` (`model.safetensors`, `model.json`) for scoring.
    Raises DataError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model_description = read_description(model_folder)
        model_section = Model.model_validate(model_description.model)
        tensors = load_file(model_folder / WEIGHTS_FILE)
        input_names = bytes(tensors["names"].tolist()).decode().split("\n")
        model = FAMILIES[model_description.family](
            model_section, input_names, tensors["mean"], tensors["spread"]
        )
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
            f"{model_folder} is not a model of this workload ({type(error).__name__}: {error})."
        ) from error

    return model.eval()


def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy over the positions that `counted` marks; the batch is
    (features [B, L, F], labels [B, L], counted [B, L])."""
    feature_windows, labels, is_counted = batch
    loss_by_position = fn.binary_cross_entropy_with_logits(
        model(feature_windows), labels.to(feature_windows.dtype), reduction="none"
    )
    return (loss_by_position * is_counted).sum() / is_counted.sum().clamp(min=1)


@torch.inference_mode()
def score_all(model: nn.Module, feature_windows: Tensor) -> Tensor:
    """Return the probability of fraud at every position: features [B, L, F] → float64 [B, L]."""
    return model(feature_windows).double().sigmoid()


@torch.inference_mode()
def score_windows(model: nn.Module, feature_windows: Tensor, window_lengths: Tensor) -> Tensor:
    """Return the probability of fraud of the last row of each history: features [B, L, F], lengths
    [B] (≥ 1) → float64 [B].

    Histories start at position 0; padding after position `lengths - 1` is ignored. If B is 8 and
    the model is wide enough (MIN_BATCH_WIDTH in scoring.py), the bits of a score do not depend on
    the position in the batch. So that the bits of a score do not depend on the position in the
    batch, the sigmoid is applied to the last positions only. Over all positions, the sigmoid's
    vectorized loop would compute the remainder differently.
    """
    return model(feature_windows, window_lengths - 1).squeeze(1).double().sigmoid()
