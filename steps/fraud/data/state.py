"""What a server knows at the end of training, and the features of later transactions made from it.

    state = State.load(release / "state")
    windows, lengths = state.windows([(new, history)])     # float32 [B, 64, F], int64 [B]

Each pair is one request, and none influences another. `new` are the transactions to score
(steps.fraud.data.schema.Rows, e.g. by `Rows.of(id=[..], time=[..], card=[..], terminal=[..], amount=[..])`), `history`
those between the end of training and now, as far as the client sends them, with the labels that are known by now
(fraud=0 otherwise: a label younger than the delay is never looked at). Window b holds the feature rows of the card's
last `length` transactions up to and including the b-th new row, oldest first, the new one at position lengths[b] - 1,
zeros behind; columns are `state.features`. With complete history the values are those that `prepare` computes, because
it is the same code. Nothing is kept between calls; calls may run in parallel threads.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import DataError
from steps.fraud.config import CONTEXT
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import NAMES, Floats, card_features, lookback_days, matrix, terminal_features
from steps.fraud.data.schema import DAY, Ints, Rows, instant
from steps.fraud.data.schema import NAMES as COLUMNS

TRAINED = "trained.npz"  # in the state of a refreshed release


def needed(rows: Rows, train_end: int, delay_days: int) -> NDArray[np.bool_]:
    """Which of the rows (sorted by (card, time, id), whole cards) a server needs from `train_end` on."""
    before = rows.time < train_end
    last = np.searchsorted(rows.card, rows.card, side="right")  # one past the card's last row
    later = np.append(0, np.cumsum(~before))
    from_end = last - np.arange(len(rows)) - (later[last] - later[np.arange(len(rows))])
    recent = rows.time >= train_end - lookback_days(delay_days) * DAY
    return before & (recent | (from_end <= CONTEXT))


def write(path: Path, rows: Rows, features: Floats, trees: Trees, facts: dict[str, Any]) -> None:
    """The state directory: the rows that are `needed`, their features, and what features depend on."""
    path.mkdir()
    for name in COLUMNS:
        np.save(path / f"{name}.npy", getattr(rows, name))
    np.save(path / "features.npy", features)
    trees.save(path / "trees.npz")
    keep = ("features", "train_end", "label_delay_days", "digest")
    (path / "state.json").write_text(json.dumps({name: facts[name] for name in keep}, indent=1) + "\n")


def trained(path: Path) -> dict[str, NDArray[Any]]:
    """The log-odds (`boosted`) of the last rows that a release was trained on, by transaction (`id`). Raises DataError.

    They come from trees that no release keeps, and cannot be computed again. A refreshed state needs fewer of these
    rows, so it has them in a file of its own.
    """
    try:
        if (path / TRAINED).exists():
            with np.load(path / TRAINED) as arrays:
                return {name: arrays[name] for name in ("id", "boosted")}
        return {"id": np.load(path / "id.npy"), "boosted": np.load(path / "features.npy")[:, -1]}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a whole serving state ({error}): release the model again.") from error


@dataclass(frozen=True)
class State:
    """Transactions of the last weeks of training, by card and by terminal."""

    rows: Rows  # sorted by (card, time, id)
    table: Floats  # float32 [n, F]: their features
    trees: Trees
    by_terminal: Ints  # order of the rows by (terminal, time, id)
    terminals: Ints  # the terminals in that order
    features: tuple[str, ...]
    train_end: int  # µs since the epoch
    label_delay_days: int

    @classmethod
    def load(cls, path: Path) -> "State":
        """The state directory at `path`. Raises DataError."""
        try:
            facts = json.loads((path / "state.json").read_text())
            rows = Rows(**{name: np.load(path / f"{name}.npy") for name in COLUMNS})
            table = np.load(path / "features.npy")
            trees = Trees.load(path / "trees.npz")
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} is not a whole serving state ({error}): release the model again.") from error
        if tuple(facts["features"]) != (*NAMES, BOOSTED):
            raise DataError(f"{path} was made by another version of the features: prepare and release again.")
        order = np.lexsort((rows.id, rows.time, rows.terminal))
        settings = facts["train_end"], facts["label_delay_days"]
        return cls(rows, table, trees, order, rows.terminal[order], (*NAMES, BOOSTED), *settings)

    def windows(self, requests: Sequence[tuple[Rows, Rows]], length: int = CONTEXT + 1) -> tuple[Floats, Ints]:
        """(float32 [B, length, F], int64 [B]) as above, in the order of the requests and of their new rows.

        Raises DataError if a new transaction is older than the state, or two of a request have the same id.
        """
        parts = [self._later(new, history) for new, history in requests]
        later = Rows.concat(parts)
        sizes = [len(part) for part in parts]
        request = np.repeat(np.arange(len(parts)), sizes)
        old = [len(part) - len(new) for part, (new, _) in zip(parts, requests, strict=True)]
        is_new = np.concatenate([np.arange(size) for size in sizes]) >= np.repeat(old, sizes)

        group, cards = _grouped(later.card, request)
        wanted = np.unique(group[is_new])
        mine = np.flatnonzero(np.isin(group, wanted))
        past, counts = _members(self.rows.card, cards[wanted % len(cards)])
        rows = Rows.concat([self.rows[past], later[mine]])
        rows = replace(rows, card=np.concatenate([np.repeat(wanted, counts), group[mine]]))
        order = np.lexsort((rows.id, rows.time, rows.card))
        place = np.argsort(order)  # of each row in that order

        fresh = place[len(past) :]
        columns = card_features(rows[order], places=fresh)
        columns |= self._terminal_columns(later, request, mine)
        later_table = matrix(columns, NAMES)
        later_table = np.column_stack([later_table, self.trees.score(later_table)])
        table = np.concatenate([self.table[past], later_table])[order]

        at = fresh[is_new[mine]]
        start = np.maximum(np.searchsorted(rows.card[order], group[is_new]), at - length + 1)
        index = start[:, None] + np.arange(length)
        windows = table[np.minimum(index, at[:, None])]
        windows[index > at[:, None]] = 0
        return windows, at - start + 1

    def _later(self, new: Rows, history: Rows) -> Rows:
        """All rows of a request since the state, the new ones last."""
        if len(set(new.id.tolist())) < len(new):
            raise DataError("two of the transactions to score have the same id: each must have its own.")
        if (new.time < self.train_end).any():
            raise DataError(
                f"a transaction of {instant(new.time.min())} UTC is older than the state of this model, which begins "
                f"at {instant(self.train_end)} UTC: only later ones can be scored."
            )
        if not len(history):
            return new
        return Rows.concat([history[(history.time >= self.train_end) & ~np.isin(history.id, new.id)], new])

    def _terminal_columns(self, later: Rows, request: Ints, mine: Ints) -> dict[str, NDArray[Any]]:
        """The features OF_TERMINAL of the rows `mine` of `later`."""
        group, terminals = _grouped(later.terminal, request)
        wanted = np.unique(group[mine])
        theirs = np.flatnonzero(np.isin(group, wanted))
        members, counts = _members(self.terminals, terminals[wanted % len(terminals)])
        past = self.by_terminal[members]
        rows = Rows.concat([self.rows[past], later[theirs]])
        rows = replace(rows, terminal=np.concatenate([np.repeat(wanted, counts), group[theirs]]))
        order = np.lexsort((rows.id, rows.time, rows.terminal))
        place = np.argsort(order)[len(past) :][np.searchsorted(theirs, mine)]
        return {name: values[place] for name, values in terminal_features(rows[order], self.label_delay_days).items()}


def _grouped(identity: Ints, request: Ints) -> tuple[Ints, Ints]:
    """(a number for each pair of request and identity; the identities: number % their count is the identity's place)"""
    identities, place = np.unique(identity, return_inverse=True)
    return request * len(identities) + place, identities


def _members(groups: Ints, wanted: Ints) -> tuple[Ints, Ints]:
    """Where the sorted `groups` hold each of `wanted`, one after the other, and how often each is there."""
    start = np.searchsorted(groups, wanted)
    sizes = np.searchsorted(groups, wanted, side="right") - start
    return np.repeat(start - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum()), sizes
