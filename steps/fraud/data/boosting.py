"""Gradient boosting on the features of single transactions. The predictions of gradient boosting
are an input of the transformer, and the baseline that the transformer is compared with.

`prepare` fits trees on the training rows, and the log-odds of the trees become a feature (BOOSTED).
The transformer also uses the history of the card. Trees are overconfident on the rows that they
were fitted on, and the transformer would learn to trust the trees too much. Therefore the training
rows are scored by trees that were fitted on other cards (cross-fitting), and later rows by trees
that were fitted on all cards.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import DataError
from steps.fraud.data.features import Floats
from steps.fraud.data.transactions import UNKNOWN, Ints

BOOSTED = "boosted"
# number of folds, which are groups of cards, for cross-fitting
FOLDS = 2
# approximate maximum number of genuine rows to fit on; more rows take longer and change little
MAX_GENUINE_ROWS = 300_000
# number of histogram bins per feature; scikit-learn allows at most 255
BINS = 250
BOOSTING_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.05,
    "max_iter": 200,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 50,
    "l2_regularization": 1,
    "early_stopping": False,
}
# leaf values are rounded to multiples of 1 / LEAF_SCALE, so that sums are exact in any order
LEAF_SCALE = 2.0**20


@dataclass(frozen=True)
class Trees:
    """Decision trees, stored as arrays of shape [trees, nodes]. Node 0 is the root; the children of
    a leaf are the leaf itself."""

    feature: NDArray[np.intp]
    # a row with a value up to the threshold (inclusive) goes to the left child
    threshold: Floats
    left: NDArray[np.intp]
    right: NDArray[np.intp]
    # log-odds of a leaf; 0 in nodes that are not leaves
    value: NDArray[np.float64]
    # log-odds that are added to the sum of the leaf values; shape []
    bias: NDArray[np.float64]
    # depth of the deepest tree; shape []
    depth: NDArray[np.intp]

    def score(self, feature_table: Floats) -> Floats:
        """Return the log-odds of fraud (float32 [n]) for the features `feature_table` [n, F]. The
        method is fast for few rows."""
        feature_indices = self.feature.ravel()
        flat_thresholds = self.threshold.ravel()
        left_child = self.left.ravel()
        right_child = self.right.ravel()
        root_indices = np.arange(len(self.value)) * self.value.shape[1]
        row_offsets = np.arange(len(feature_table))[:, None] * feature_table.shape[1]
        node_indices = np.broadcast_to(root_indices, (len(feature_table), len(root_indices)))
        flat_features = feature_table.ravel()

        for _ in range(int(self.depth)):
            goes_left = flat_features.take(
                row_offsets + feature_indices.take(node_indices)
            ) <= flat_thresholds.take(node_indices)
            node_indices = root_indices + np.where(
                goes_left, left_child.take(node_indices), right_child.take(node_indices)
            )

        return (self.value.ravel().take(node_indices).sum(1) + self.bias).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the trees to a file."""
        write_arrays(path, vars(self))

    @classmethod
    def load(cls, path: Path) -> "Trees":
        """Read the trees from a file that `save` wrote. Raises OSError, ValueError or KeyError."""
        with np.load(path) as stored_arrays:
            return cls(
                **{
                    field_name: stored_arrays[field_name]
                    for field_name in (field.name for field in fields(cls))
                }
            )


def write_arrays(path: Path, arrays_by_name: Mapping[str, NDArray[Any]]) -> None:
    """Write a file for `numpy.load`; unlike the file of `numpy.savez`, the written file does not
    depend on Python's version."""
    with ZipFile(path, "w") as archive:
        for array_name, array in arrays_by_name.items():
            array_buffer = io.BytesIO()
            np.save(array_buffer, array, allow_pickle=False)
            archive.writestr(ZipInfo(f"{array_name}.npy"), array_buffer.getvalue())


class Sample:
    """The rows to fit trees on: all frauds, and a random sample of about MAX_GENUINE_ROWS genuine
    rows. `add` takes the training rows piece by piece."""

    def __init__(self, training_row_count: int) -> None:
        """`training_row_count`: number of training rows in all pieces."""
        self.rate = min(1.0, MAX_GENUINE_ROWS / training_row_count)
        self.pieces: list[tuple[Floats, NDArray[np.uint8], Ints]] = []

    def add(
        self,
        feature_table: Floats,
        labels: NDArray[np.uint8],
        card_ids: Ints,
        is_usable: NDArray[np.bool_],
    ) -> None:
        """Add a piece of the training data.

        `is_usable`: mask of the rows between the warm-up and the end of training.
        """
        is_drawn = np.random.default_rng(len(self.pieces)).random(len(feature_table)) < self.rate
        is_sampled = is_usable & (labels != UNKNOWN) & (is_drawn | (labels == 1))
        self.pieces.append((feature_table[is_sampled], labels[is_sampled], card_ids[is_sampled]))

    def fit(self) -> "Boosting":
        """For each fold, fit trees on the cards of the other folds; these trees score the cards of
        the fold. Also fit trees on all cards, which score later rows. Raises DataError if all rows
        have the same label."""
        feature_table, labels, card_ids = (
            np.concatenate(arrays) for arrays in zip(*self.pieces, strict=True)
        )
        if len(np.unique(labels)) < 2:
            raise DataError(
                f"nothing to learn from: {len(labels):,} transactions with {int(labels.sum()):,}"
                " frauds after the first days of the data, which only give context, and before the"
                " end of training. Give more data."
            )

        thresholds_by_feature = [
            _find_bin_edges(feature_column) for feature_column in feature_table.T
        ]
        bin_numbers = np.stack(
            [
                np.searchsorted(feature_thresholds, feature_column)
                for feature_thresholds, feature_column in zip(
                    thresholds_by_feature, feature_table.T, strict=True
                )
            ],
            axis=1,
        )
        row_weights = np.where(labels == 1, 1, 1 / self.rate)

        with _limit_to_one_thread():
            model_of_all = _fit_trees(bin_numbers, labels, row_weights, thresholds_by_feature)
            fold_models = []

            for fold_number in range(FOLDS):
                is_other_fold = card_ids % FOLDS != fold_number
                if len(np.unique(labels[is_other_fold])) < 2:
                    fold_models.append(model_of_all)
                    continue

                fold_model = _fit_trees(
                    bin_numbers[is_other_fold],
                    labels[is_other_fold],
                    row_weights[is_other_fold],
                    thresholds_by_feature,
                )
                fold_models.append(fold_model)

            return Boosting([*fold_models, model_of_all])


@dataclass(frozen=True)
class Boosting:
    """Models of scikit-learn: one per fold, fitted on the cards of all other folds, and a last one,
    fitted on all cards."""

    models: Sequence[Any]

    def score(
        self, feature_table: Floats, card_ids: Ints, is_training_row: NDArray[np.bool_]
    ) -> Floats:
        """Return the log-odds of fraud of many rows, equal to the result of `Trees.score`."""
        log_odds = np.empty(len(feature_table), np.float32)
        model_index = np.where(is_training_row, card_ids % FOLDS, FOLDS)
        with _limit_to_one_thread():
            for model_number, fold_model in enumerate(self.models):
                row_indices = np.flatnonzero(model_index == model_number)
                if row_indices.size:
                    log_odds[row_indices] = fold_model.decision_function(feature_table[row_indices])
        return log_odds

    def trees(self) -> Trees:
        """Return the trees that score rows after the end of training."""
        return _export_trees(self.models[-1])


def _limit_to_one_thread() -> Any:
    """Limit libraries to one thread. With several threads, the sums of gradients would change, and
    busy waiting would slow down other processes."""
    import sklearn.ensemble  # noqa: F401 - only loaded libraries can be limited
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _find_bin_edges(feature_values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the candidate thresholds of a feature, which are quantiles, with finer steps at both
    ends, where most frauds are."""
    tail_quantiles = 0.5 ** np.linspace(1, 17, BINS // 4)
    quantiles = np.concatenate(
        [np.linspace(0.01, 0.99, BINS // 2), tail_quantiles, 1 - tail_quantiles]
    )
    return np.unique(np.quantile(feature_values, np.sort(quantiles), method="lower"))


def _fit_trees(
    bin_numbers: Ints, labels: object, row_weights: object, thresholds_by_feature: list[Floats]
) -> Any:
    """Fit a model on the bin numbers `bin_numbers`, convert its thresholds to feature values in
    `thresholds_by_feature`, and round its leaf values."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model: Any = HistGradientBoostingClassifier(**BOOSTING_SETTINGS, random_state=0)
    model.fit(bin_numbers.astype(np.float32), labels, sample_weight=row_weights)

    for [tree_predictor] in model._predictors:
        tree_nodes = tree_predictor.nodes
        inner_nodes = np.flatnonzero(tree_nodes["is_leaf"] == 0)
        # use the lower bin, because thresholds lie between two bin numbers
        bin_thresholds = tree_nodes["num_threshold"][inner_nodes].astype(int)
        feature_indices = tree_nodes["feature_idx"][inner_nodes]
        tree_nodes["num_threshold"][inner_nodes] = [
            thresholds_by_feature[feature_index][bin_index]
            for feature_index, bin_index in zip(feature_indices, bin_thresholds, strict=True)
        ]
        tree_nodes["value"] = np.rint(tree_nodes["value"] * LEAF_SCALE) / LEAF_SCALE

    model._baseline_prediction = np.rint(model._baseline_prediction * LEAF_SCALE) / LEAF_SCALE
    return model


def _export_trees(model: Any) -> Trees:
    """Convert a fitted model of scikit-learn to arrays; smaller trees are padded to the size of the
    largest tree."""
    tree_node_arrays = [tree_predictor.nodes for [tree_predictor] in model._predictors]
    array_shape = len(tree_node_arrays), max(map(len, tree_node_arrays))
    own_index = np.broadcast_to(np.arange(array_shape[1]), array_shape)

    tree_arrays: dict[str, Any] = {
        "feature": np.zeros(array_shape, np.intp),
        "threshold": np.zeros(array_shape, np.float32),
        "left": own_index.copy(),
        "right": own_index.copy(),
        "value": np.zeros(array_shape),
    }

    for tree_number, tree_nodes in enumerate(tree_node_arrays):
        is_leaf = tree_nodes["is_leaf"] == 1
        node_index = np.arange(len(tree_nodes))
        tree_arrays["feature"][tree_number, node_index] = np.where(
            is_leaf, 0, tree_nodes["feature_idx"]
        )
        tree_arrays["threshold"][tree_number, node_index] = tree_nodes["num_threshold"]
        tree_arrays["left"][tree_number, node_index] = np.where(
            is_leaf, node_index, tree_nodes["left"]
        )
        tree_arrays["right"][tree_number, node_index] = np.where(
            is_leaf, node_index, tree_nodes["right"]
        )
        tree_arrays["value"][tree_number, node_index] = np.where(is_leaf, tree_nodes["value"], 0)

    max_depth = max(int(tree_nodes["depth"].max()) for tree_nodes in tree_node_arrays)
    return Trees(
        **tree_arrays, bias=model._baseline_prediction.reshape(()), depth=np.array(max_depth)
    )
