from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.errors import DataError
from rekindle.training.spec import TrainingSpec
from rekindle.training.validation import split_samples


class IndexDataset:
    """A dataset of samples whose values are their indices."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (indices,)

    def dataset(self, path: Path, split: str) -> Any:
        return {"validation": IndexDataset(self.count // 10)}[split]


def make_spec(**settings: Any) -> TrainingSpec:
    values = {"workload": "w", "dataset": "d", "digest": "d" * 64, "out": "o", "checkpoints": "c"}
    return TrainingSpec.model_validate(values | settings)


def list_indices(subset: Any) -> list[int]:
    return subset.batch(torch.arange(len(subset)))[0].tolist()


def test_held_out_samples_are_an_exact_share_chosen_by_the_seed() -> None:
    rows: Any = IndexDataset(200)
    training_samples, held_out = split_samples(make_spec(validation=0.1), rows, rows, Path())
    assert len(list_indices(held_out)) == 20
    assert sorted(list_indices(training_samples) + list_indices(held_out)) == list(range(200))
    assert list_indices(
        split_samples(make_spec(validation=0.1, workers=1), rows, rows, Path())[1]
    ) == list_indices(held_out)
    assert list_indices(
        split_samples(make_spec(validation=0.1, seed=1), rows, rows, Path())[1]
    ) != list_indices(held_out)


def test_a_workload_may_define_its_validation_split_which_must_not_be_empty() -> None:
    rows: Any = IndexDataset(200)
    training_samples, held_out = split_samples(make_spec(validation="workload"), rows, rows, Path())
    assert len(training_samples) == 200
    assert len(list_indices(held_out)) == 20
    four_samples: Any = IndexDataset(4)
    with pytest.raises(DataError, match="the validation split is empty"):
        split_samples(make_spec(validation="workload"), four_samples, four_samples, Path())
    with pytest.raises(DataError, match="which holds out 0 of 4 samples"):
        split_samples(make_spec(validation=0.1), four_samples, four_samples, Path())
