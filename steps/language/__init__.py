"""Example workload: a small GPT over bytes, trained on the language reference that Python ships
(about 700 kB).

    rekindle run configs/language.yaml

The metric is the number of bits per byte on the last tenth of the text. An instance contains a
text; the prediction contains the numbers of bits and bytes of the text and, if requested, the most
likely next bytes. Architecture: A. Radford and others, Language Models are Unsupervised Multitask
Learners (2019).
"""

import argparse
import ast
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rekindle import DataConfig, DataError, Metric, Prepared, Section

if TYPE_CHECKING:
    import torch

# byte that is put before each text, so that the first byte of the text is also predicted
START = 0


class Data(DataConfig):
    source: str = Field(
        "python://topics",
        description=(
            "a text file in UTF-8, python://topics (Python's language reference) or python://code"
        ),
    )
    test_share: float = Field(
        0.1, gt=0, lt=1, description="share of the text that is test data, taken from the end"
    )
    window: int = Field(
        64, ge=8, le=1024, description="number of bytes that the model sees at once"
    )

    def first_rows(self, rows: int, folder: Path) -> Self:
        # use the whole text, because preparing it takes only a second
        return self


class Model(Section):
    width: int = Field(64, ge=8, le=1024, description="size of the hidden state of each byte")
    layers: int = Field(2, ge=1, le=12, description="number of layers")
    heads: int = Field(4, ge=1, description="number of attention heads; must divide width")

    @model_validator(mode="after")
    def _check_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}: it must be a multiple of heads ({self.heads})"
            )
        return self


class Instance(BaseModel):
    """A text. A text to predict. If the text is longer than the model's window, only its last bytes
    are used."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=10_000)
    continue_bytes: int = Field(
        0, ge=0, le=100, description="number of most likely next bytes to return"
    )


def bits_per_byte(predictions: list[Any], truths: Any) -> float:
    return sum(prediction["bits"] for prediction in predictions) / sum(truths)


metrics = (Metric("bits_per_byte", bits_per_byte, better="lower", unit="bits", digits=3),)


def prepare(data: Data, out: Path) -> Prepared:
    if data.source == "python://topics":
        from pydoc_data.topics import topics

        text_bytes = "\n\n".join(topics[topic_name] for topic_name in sorted(topics)).encode()
    elif data.source == "python://code":
        text_bytes = b"\n\n".join(
            Path(documented_module.__file__ or "").read_bytes()
            for documented_module in (argparse, ast, inspect)
        )
    else:
        try:
            text_bytes = Path(data.source).read_text().encode()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{data.source} cannot be read ({error}): data.source must be a text file."
            ) from error

    train_byte_count = int(len(text_bytes) * (1 - data.test_share))
    if min(train_byte_count, len(text_bytes) - train_byte_count) <= data.window:
        raise DataError(
            f"{data.source} has {len(text_bytes)} bytes: too few for data.window ({data.window})."
            " Lower data.window."
        )

    (out / "train.txt").write_bytes(text_bytes[:train_byte_count])
    (out / "test.txt").write_bytes(text_bytes[train_byte_count:])
    return Prepared(
        rows=len(text_bytes), facts={"window": data.window}, tags={"train_bytes": train_byte_count}
    )


class Windows:
    """All windows of `window` bytes of a text; a batch is int64 [B, window + 1], where the first
    byte is only context."""

    def __init__(self, path: Path, split_name: str) -> None:
        import torch

        from rekindle.workload import read_dataset_facts

        text_bytes = bytearray((path / f"{split_name}.txt").read_bytes())
        self.windows = torch.frombuffer(text_bytes, dtype=torch.uint8).unfold(
            0, read_dataset_facts(path)["window"] + 1, 1
        )

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        return (self.windows[indices].long(),)


def dataset(path: Path, split: str) -> Windows:
    return Windows(path, split)


example_facts = {"window": 64}


def model(section: Model, facts: dict[str, Any]) -> "torch.nn.Module":
    from steps.language.gpt import GPT

    return GPT(facts["window"], section.width, section.layers, section.heads)


def loss(model: "torch.nn.Module", batch: tuple["torch.Tensor", ...]) -> "torch.Tensor":
    from torch.nn.functional import cross_entropy

    (token_batch,) = batch
    return cross_entropy(model(token_batch[:, :-1]).flatten(0, 1), token_batch[:, 1:].flatten())


def examples(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    from rekindle.workload import read_dataset_facts

    test_text = (path / "test.txt").read_bytes().decode(errors="ignore")
    window_bytes = read_dataset_facts(path)["window"]
    for excerpt_start in range(0, len(test_text), window_bytes):
        excerpt = test_text[excerpt_start : excerpt_start + window_bytes]
        yield {"text": excerpt}, len(excerpt.encode()[-window_bytes:])


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each text its information content in bits, summed over its bytes given the
    preceding bytes, and the most likely next bytes."""
    import torch

    window_bytes = facts["window"]
    encoded_texts = [instance.text.encode()[-window_bytes:] for instance in instances]
    # pad the texts to a fixed shape
    tokens = torch.tensor(
        [
            [START, *encoded_text, *[START] * (window_bytes - len(encoded_text))]
            for encoded_text in encoded_texts
        ]
    )
    nats_by_byte = (
        -model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].double()
    )
    is_padding = torch.arange(window_bytes) >= torch.tensor(
        [[len(encoded_text)] for encoded_text in encoded_texts]
    )
    bits_by_text = nats_by_byte.masked_fill(is_padding, 0).sum(1) / math.log(2)

    predictions = [
        {"bits": total_bits, "bytes": len(encoded_text)}
        for total_bits, encoded_text in zip(bits_by_text.tolist(), encoded_texts, strict=True)
    ]
    for prediction, instance in zip(predictions, instances, strict=True):
        if instance.continue_bytes:
            prediction["continuation"] = _continue_text(model, instance, window_bytes)

    return predictions


def _continue_text(model: Any, instance: Instance, window_bytes: int) -> str:
    import torch

    continued_text = instance.text.encode()
    for _ in range(instance.continue_bytes):
        visible_tokens = [START, *continued_text][-window_bytes:]
        tokens = torch.tensor([[*visible_tokens, *[START] * (window_bytes - len(visible_tokens))]])
        continued_text += bytes([int(model(tokens)[0, len(visible_tokens) - 1].argmax())])
    return continued_text[len(instance.text.encode()) :].decode(errors="replace")
