"""An example workload: a small CNN with BatchNorm recognizes digits in the 1,797 images that
scikit-learn ships.

    rekindle run configs/digits.yaml

The test data is the last fifth of the images, which other people wrote than the training data.
Source: the images are from E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI
Machine Learning Repository (1998).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, Field

from rekindle import DataConfig, Metric, Prepared, Section

if TYPE_CHECKING:
    import torch

Pixel = Annotated[float, Field(ge=0, le=16, description="darkness of the pixel")]
Row = Annotated[list[Pixel], Field(min_length=8, max_length=8)]


class Data(DataConfig):
    source: str = Field(
        "sklearn://digits",
        pattern="^sklearn://digits$",
        description="the images that scikit-learn ships",
    )
    test_share: float = Field(
        0.2, gt=0, lt=1, description="share of the images that are test data, taken from the end"
    )

    def first_rows(self, rows: int, folder: Path) -> Self:
        # use all rows, because preparing all images takes only a second
        return self


class Model(Section):
    channels: int = Field(
        16,
        ge=1,
        le=256,
        description=(
            "number of channels of the first convolution; the second convolution has twice as many"
        ),
    )
    dropout: float = Field(
        0.2, ge=0, lt=1, description="share of activations that are dropped in training"
    )


class Instance(BaseModel):
    """One image of 8 x 8 pixels, the top row first."""

    pixels: Annotated[list[Row], Field(min_length=8, max_length=8)]


def accuracy(predictions: list[Any], true_digits: Any) -> float:
    """Return the accuracy: the fraction of images whose predicted digit is right."""
    return sum(
        prediction["digit"] == true_digit
        for prediction, true_digit in zip(predictions, true_digits, strict=True)
    ) / len(predictions)


def log_loss(predictions: list[Any], true_digits: Any) -> float:
    """Return the mean of -ln(probability of the true digit)."""
    import math

    true_probabilities = [
        prediction["probabilities"][true_digit]
        for prediction, true_digit in zip(predictions, true_digits, strict=True)
    ]
    return -sum(
        math.log(max(true_probability, 1e-12)) for true_probability in true_probabilities
    ) / len(true_probabilities)


metrics = (
    Metric("accuracy", accuracy, description="share of images with the right digit"),
    Metric(
        "log_loss",
        log_loss,
        better="lower",
        unit="nats",
        description="mean negative logarithm of the probability of the right digit",
    ),
)


def prepare(data: Data, out: Path) -> Prepared:
    import numpy as np
    from sklearn.datasets import load_digits

    digits_dataset: Any = load_digits()
    train_image_count = int(len(digits_dataset.images) * (1 - data.test_share))
    for split_name, split_rows in (
        ("train", slice(None, train_image_count)),
        ("test", slice(train_image_count, None)),
    ):
        np.save(
            out / f"{split_name}-images.npy", digits_dataset.images[split_rows].astype("float32")
        )
        np.save(out / f"{split_name}-labels.npy", digits_dataset.target[split_rows].astype("int64"))
    return Prepared(
        rows=len(digits_dataset.images),
        tags={"train": train_image_count, "test": len(digits_dataset.images) - train_image_count},
    )


class Images:
    """The images of one split; a batch contains float32 images [B, 1, 8, 8] with values from 0 to
    1, and int64 labels [B]."""

    def __init__(self, path: Path, split_name: str) -> None:
        import numpy as np
        import torch

        self.images = torch.from_numpy(np.load(path / f"{split_name}-images.npy"))[:, None] / 16
        self.labels = torch.from_numpy(np.load(path / f"{split_name}-labels.npy"))

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        return self.images[indices], self.labels[indices]


def dataset(path: Path, split: str) -> Images:
    return Images(path, split)


def model(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    from torch import nn

    channel_count = section.channels

    return nn.Sequential(
        *(
            nn.Conv2d(1, channel_count, 3, padding=1),
            nn.BatchNorm2d(channel_count),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Conv2d(channel_count, 2 * channel_count, 3, padding=1),
            nn.BatchNorm2d(2 * channel_count),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Dropout(section.dropout), nn.Linear(8 * channel_count, 10)),
    )


def loss(model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
    from torch.nn.functional import cross_entropy

    images, labels = batch
    return cross_entropy(model(images), labels)


def examples(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    test_images = Images(path, "test")
    for image, label in zip(test_images.images, test_images.labels, strict=True):
        yield {"pixels": (image[0] * 16).tolist()}, int(label)


def predict(
    model: "torch.nn.Module", instances: list[Instance], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    import torch

    images = torch.tensor([instance.pixels for instance in instances])[:, None] / 16
    probabilities = model(images).softmax(1)
    return [
        {"digit": int(image_probabilities.argmax()), "probabilities": image_probabilities.tolist()}
        for image_probabilities in probabilities
    ]
