"""Gradient boosting on the features of single transactions: where the transformer begins, what it must improve on.

`prepare` fits the trees on the training rows; their log-odds are a feature (BOOSTED), to which the transformer adds
what it sees in the card's history. It would trust them too much if they knew the answers: so training rows are scored
by trees of other cards, and all later ones by trees of all cards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import DataError
from steps.fraud.data.features import Floats
from steps.fraud.data.schema import UNKNOWN, Ints

BOOSTED = "boosted"
FOLDS = 2  # groups of cards
ROWS = 300_000  # genuine rows to learn from, at most; more take longer and change little
BINS = 250  # of a feature; sklearn takes at most 255
SHAPE: dict[str, Any] = {
    "learning_rate": 0.05,
    "max_iter": 200,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 50,
    "l2_regularization": 1,
    "early_stopping": False,
}
GRAIN = 2.0**20  # leaf values are multiples of 1 / GRAIN, so their sum is exact in any order


@dataclass(frozen=True)
class Trees:
    """Decision trees as arrays [trees, nodes]: node 0 is the root, and a leaf leads to itself."""

    feature: NDArray[np.intp]
    threshold: Floats  # left if the feature is at most this
    left: NDArray[np.intp]
    right: NDArray[np.intp]
    value: NDArray[np.float64]  # 0 but in leaves
    bias: NDArray[np.float64]  # []
    depth: NDArray[np.intp]  # [] of the deepest tree

    def score(self, table: Floats) -> Floats:
        """Log-odds of fraud for the features [n, F]: float32 [n]. For few rows: a gather a level over all trees."""
        feature, threshold, left, right = (a.ravel() for a in (self.feature, self.threshold, self.left, self.right))
        root = np.arange(len(self.value)) * self.value.shape[1]
        row = np.arange(len(table))[:, None] * table.shape[1]
        node, flat = np.broadcast_to(root, (len(table), len(root))), table.ravel()
        for _ in range(int(self.depth)):
            below = flat.take(row + feature.take(node)) <= threshold.take(node)
            node = root + np.where(below, left.take(node), right.take(node))
        return (self.value.ravel().take(node).sum(1) + self.bias).astype(np.float32)

    def save(self, path: Path) -> None:
        """A file that `load` reads."""
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **{name.name: getattr(self, name.name) for name in fields(self)})

    @classmethod
    def load(cls, path: Path) -> "Trees":
        """Raises OSError, ValueError or KeyError."""
        with np.load(path) as arrays:
            return cls(**{name.name: arrays[name.name] for name in fields(cls)})


class Sample:
    """The rows to learn from, collected piece by piece: every fraud, and of the rest about ROWS."""

    def __init__(self, total: int) -> None:
        """`total`: training rows in all pieces."""
        self.rate = min(1.0, ROWS / total)
        self.parts: list[tuple[Floats, NDArray[np.uint8], Ints]] = []

    def add(self, table: Floats, labels: NDArray[np.uint8], cards: Ints, usable: NDArray[np.bool_]) -> None:
        """`usable`: rows of the training time after its warm-up."""
        drawn = np.random.default_rng(len(self.parts)).random(len(table)) < self.rate
        keep = usable & (labels != UNKNOWN) & (drawn | (labels == 1))
        self.parts.append((table[keep], labels[keep], cards[keep]))

    def fit(self) -> "Boosting":
        """The trees for each fold of cards and for later rows."""
        table, labels, cards = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        if len(np.unique(labels)) < 2:
            raise DataError(
                f"nothing to learn from: {len(labels):,} transactions with {int(labels.sum()):,} frauds between the "
                "first days of the data, which only give context, and the end of training. Give more data."
            )
        edges = [_edges(column) for column in table.T]
        codes = np.stack([np.searchsorted(e, column) for e, column in zip(edges, table.T, strict=True)], axis=1)
        weight = np.where(labels == 1, 1, 1 / self.rate)
        with _one_thread():
            whole = _fit(codes, labels, weight, edges)
            models = []
            for fold in range(FOLDS):
                rows = cards % FOLDS != fold
                both = len(np.unique(labels[rows])) == 2
                models.append(_fit(codes[rows], labels[rows], weight[rows], edges) if both else whole)
            return Boosting([*models, whole])


@dataclass(frozen=True)
class Boosting:
    """scikit-learn's models: of all cards but those of each fold, then of all cards."""

    models: Sequence[Any]

    def score(self, table: Floats, cards: Ints, training: NDArray[np.bool_]) -> Floats:
        """Log-odds of many rows: the values of `Trees.score`."""
        result = np.empty(len(table), np.float32)
        which = np.where(training, cards % FOLDS, FOLDS)
        with _one_thread():
            for number, model in enumerate(self.models):
                if (rows := np.flatnonzero(which == number)).size:
                    result[rows] = model.decision_function(table[rows])
        return result

    def trees(self) -> Trees:
        """Those for later rows."""
        return _exported(self.models[-1])


def _one_thread() -> Any:
    """Sums of gradients depend on the number of threads, and threads that wait burn the cores of others."""
    import sklearn.ensemble  # noqa: F401 - only libraries that are loaded can be limited
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1)


def _edges(column: NDArray[np.float32]) -> NDArray[np.float32]:
    """Where a feature may be cut: at its quantiles, and ever more finely towards both ends, where frauds are."""
    half = 0.5 ** np.linspace(1, 17, BINS // 4)
    at = np.concatenate([np.linspace(0.01, 0.99, BINS // 2), half, 1 - half])
    return np.unique(np.quantile(column, np.sort(at), method="lower"))


def _fit(codes: Ints, labels: Any, weight: Any, edges: list[Floats]) -> Any:
    """A model over the features themselves, whose cuts are `edges` and whose leaves are rounded."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model: Any = HistGradientBoostingClassifier(**SHAPE, random_state=0)
    model.fit(codes.astype(np.float32), labels, sample_weight=weight)
    for [predictor] in model._predictors:
        nodes = predictor.nodes
        inner = np.flatnonzero(nodes["is_leaf"] == 0)
        cuts = nodes["num_threshold"][inner].astype(int)  # between two codes
        features = nodes["feature_idx"][inner]
        nodes["num_threshold"][inner] = [edges[f][c] for f, c in zip(features, cuts, strict=True)]
        nodes["value"] = np.rint(nodes["value"] * GRAIN) / GRAIN
    model._baseline_prediction = np.rint(model._baseline_prediction * GRAIN) / GRAIN
    return model


def _exported(model: Any) -> Trees:
    trees = [predictor.nodes for [predictor] in model._predictors]
    shape = len(trees), max(map(len, trees))
    itself = np.broadcast_to(np.arange(shape[1]), shape)
    arrays: dict[str, Any] = {"feature": np.zeros(shape, np.intp), "threshold": np.zeros(shape, np.float32)}
    arrays |= {"left": itself.copy(), "right": itself.copy(), "value": np.zeros(shape)}
    for number, nodes in enumerate(trees):
        leaf = nodes["is_leaf"] == 1
        place = np.arange(len(nodes))
        arrays["feature"][number, place] = np.where(leaf, 0, nodes["feature_idx"])
        arrays["threshold"][number, place] = nodes["num_threshold"]
        arrays["left"][number, place] = np.where(leaf, place, nodes["left"])
        arrays["right"][number, place] = np.where(leaf, place, nodes["right"])
        arrays["value"][number, place] = np.where(leaf, nodes["value"], 0)
    depth = max(int(nodes["depth"].max()) for nodes in trees)
    return Trees(**arrays, bias=model._baseline_prediction.reshape(()), depth=np.array(depth))
