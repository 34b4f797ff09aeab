"""Gradient boosting on the features of single transactions; its output is an input of the
transformer, and the baseline for the transformer.

`prepare` fits trees on the training rows, and their log-odds become a feature (BOOSTED). The
transformer adds the history of the card. Trees are overconfident on the rows that they were fitted
on, and the transformer would learn to trust them too much. So trees that were fitted on other cards
score the training rows (cross-fitting), and trees that were fitted on all cards score later rows.
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
FOLDS = 2  # number of folds, which are groups of cards, for cross-fitting
# approximate maximum number of genuine rows to fit on; more rows take longer and change little
MAX_GENUINE_ROWS = 300_000
BINS = 250  # number of histogram bins per feature; scikit-learn allows at most 255
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
    threshold: Floats  # a row goes left up to the threshold, inclusive
    left: NDArray[np.intp]
    right: NDArray[np.intp]
    value: NDArray[np.float64]  # log-odds of a leaf; 0 in all other nodes
    bias: NDArray[np.float64]  # log-odds that are added to the sum of the leaf values; shape []
    depth: NDArray[np.intp]  # depth of the deepest tree; shape []

    def score(self, table: Floats) -> Floats:
        """Return the log-odds of fraud (float32 [n]) for the features `table` [n, F]. This is fast
        for few rows."""
        feature = self.feature.ravel()
        threshold = self.threshold.ravel()
        left_child = self.left.ravel()
        right_child = self.right.ravel()
        root = np.arange(len(self.value)) * self.value.shape[1]
        row = np.arange(len(table))[:, None] * table.shape[1]
        node = np.broadcast_to(root, (len(table), len(root)))
        flat = table.ravel()

        for _ in range(int(self.depth)):
            goes_left = flat.take(row + feature.take(node)) <= threshold.take(node)
            node = root + np.where(goes_left, left_child.take(node), right_child.take(node))

        return (self.value.ravel().take(node).sum(1) + self.bias).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the trees to a file."""
        write_arrays(path, vars(self))

    @classmethod
    def load(cls, path: Path) -> "Trees":
        """Read the trees from a file that `save` wrote. Raises OSError, ValueError or KeyError."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in (field.name for field in fields(cls))})


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a file for `numpy.load`; unlike the file of `numpy.savez`, its bytes do not depend on
    Python's version."""
    with ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            archive.writestr(ZipInfo(f"{name}.npy"), content.getvalue())


class Sample:
    """The rows to fit trees on: all frauds, and a random sample of about MAX_GENUINE_ROWS genuine
    rows. `add` takes the training rows piece by piece."""

    def __init__(self, total: int) -> None:
        """`total`: number of training rows in all pieces."""
        self.rate = min(1.0, MAX_GENUINE_ROWS / total)
        self.pieces: list[tuple[Floats, NDArray[np.uint8], Ints]] = []

    def add(
        self, table: Floats, labels: NDArray[np.uint8], cards: Ints, is_usable: NDArray[np.bool_]
    ) -> None:
        """Add a piece of the training data.

        `is_usable`: mask of the rows between the warm-up and the end of training.
        """
        is_drawn = np.random.default_rng(len(self.pieces)).random(len(table)) < self.rate
        keep = is_usable & (labels != UNKNOWN) & (is_drawn | (labels == 1))
        self.pieces.append((table[keep], labels[keep], cards[keep]))

    def fit(self) -> "Boosting":
        """For each fold, fit trees that score its cards. Also fit trees on all cards, which score
        later rows."""
        table, labels, cards = (np.concatenate(column) for column in zip(*self.pieces, strict=True))
        if len(np.unique(labels)) < 2:
            raise DataError(
                f"nothing to learn from: {len(labels):,} transactions with {int(labels.sum()):,}"
                " frauds after the first days of the data, which only give context, and before the"
                " end of training. Give more data."
            )

        edges = [_edges(column) for column in table.T]
        codes = np.stack(
            [np.searchsorted(e, column) for e, column in zip(edges, table.T, strict=True)], axis=1
        )
        weight = np.where(labels == 1, 1, 1 / self.rate)

        with _limit_to_one_thread():
            model_of_all = _fit(codes, labels, weight, edges)
            models = []

            for fold in range(FOLDS):
                rows = cards % FOLDS != fold
                has_both_labels = len(np.unique(labels[rows])) == 2
                models.append(
                    _fit(codes[rows], labels[rows], weight[rows], edges)
                    if has_both_labels
                    else model_of_all
                )

            return Boosting([*models, model_of_all])


@dataclass(frozen=True)
class Boosting:
    """Models of scikit-learn: one per fold, fitted on the cards of all other folds, and a last one,
    fitted on all cards."""

    models: Sequence[Any]

    def score(self, table: Floats, cards: Ints, training: NDArray[np.bool_]) -> Floats:
        """Return the log-odds of fraud of many rows, equal to the result of `Trees.score`."""
        result = np.empty(len(table), np.float32)
        model_index = np.where(training, cards % FOLDS, FOLDS)
        with _limit_to_one_thread():
            for number, model in enumerate(self.models):
                rows = np.flatnonzero(model_index == number)
                if rows.size:
                    result[rows] = model.decision_function(table[rows])
        return result

    def trees(self) -> Trees:
        """Return the trees that score rows after the end of training."""
        return _export(self.models[-1])


def _limit_to_one_thread() -> Any:
    """Limit libraries to one thread. With more threads, the sums of gradients would change, and
    busy waiting would slow down other processes."""
    import sklearn.ensemble  # noqa: F401 - only loaded libraries can be limited
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _edges(column: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the candidate thresholds of a feature. They are quantiles, with finer steps at both
    ends, where most frauds are."""
    tail = 0.5 ** np.linspace(1, 17, BINS // 4)
    quantiles = np.concatenate([np.linspace(0.01, 0.99, BINS // 2), tail, 1 - tail])
    return np.unique(np.quantile(column, np.sort(quantiles), method="lower"))


def _fit(codes: Ints, labels: object, weight: object, edges: list[Floats]) -> Any:
    """Fit a model on the bin numbers `codes`, convert its thresholds to feature values in `edges`,
    and round its leaf values."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model: Any = HistGradientBoostingClassifier(**BOOSTING_SETTINGS, random_state=0)
    model.fit(codes.astype(np.float32), labels, sample_weight=weight)

    for [predictor] in model._predictors:
        nodes = predictor.nodes
        inner_nodes = np.flatnonzero(nodes["is_leaf"] == 0)
        # thresholds lie between two bin numbers; use the lower bin
        cuts = nodes["num_threshold"][inner_nodes].astype(int)
        features = nodes["feature_idx"][inner_nodes]
        nodes["num_threshold"][inner_nodes] = [
            edges[f][c] for f, c in zip(features, cuts, strict=True)
        ]
        nodes["value"] = np.rint(nodes["value"] * LEAF_SCALE) / LEAF_SCALE

    model._baseline_prediction = np.rint(model._baseline_prediction * LEAF_SCALE) / LEAF_SCALE
    return model


def _export(model: Any) -> Trees:
    trees = [predictor.nodes for [predictor] in model._predictors]
    shape = len(trees), max(map(len, trees))
    own_index = np.broadcast_to(np.arange(shape[1]), shape)

    arrays: dict[str, Any] = {
        "feature": np.zeros(shape, np.intp),
        "threshold": np.zeros(shape, np.float32),
        "left": own_index.copy(),
        "right": own_index.copy(),
        "value": np.zeros(shape),
    }

    for number, nodes in enumerate(trees):
        is_leaf = nodes["is_leaf"] == 1
        index = np.arange(len(nodes))
        arrays["feature"][number, index] = np.where(is_leaf, 0, nodes["feature_idx"])
        arrays["threshold"][number, index] = nodes["num_threshold"]
        arrays["left"][number, index] = np.where(is_leaf, index, nodes["left"])
        arrays["right"][number, index] = np.where(is_leaf, index, nodes["right"])
        arrays["value"][number, index] = np.where(is_leaf, nodes["value"], 0)

    depth = max(int(nodes["depth"].max()) for nodes in trees)
    return Trees(**arrays, bias=model._baseline_prediction.reshape(()), depth=np.array(depth))
