"""The serving state: the transactions before the end of training that servers need for the features
of later transactions.

    state = State.load(release / "state")
    windows, lengths = state.windows([(new, history)])     # float32 [B, 64, F], int64 [B]

Each pair is an independent request: `new` are the transactions to score
(steps.fraud.data.transactions.Rows, for example from `Rows.of(id=[..], time=[..], card=[..],
terminal=[..], amount=[..])`), and `history` are the transactions since the end of training, which
the client sends with the labels that it knows (fraud=0 if a label is unknown; labels within the
delay are not used). Window b contains the features (columns `state.features`) of the last `length`
transactions of the card up to the b-th new row: oldest first, the new row at position lengths[b] -
1, then zeros. If the history is complete, the values equal the features that `prepare` computes,
because the code is the same. Calls store no state, so they may run in parallel threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rekindle.errors import DataError
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import (
    NAMES,
    Floats,
    card_features,
    lookback_days,
    matrix,
    terminal_features,
)
from steps.fraud.data.transactions import DAY, Ints, Rows, format_instant
from steps.fraud.data.transactions import NAMES as COLUMNS
from steps.fraud.fraud_config import CONTEXT

# file in a refreshed state: log-odds of the last training rows, see `load_trained`
TRAINED = "trained.npz"


def needed(rows: Rows, train_end: int, delay_days: int) -> NDArray[np.bool_]:
    """Return a mask of the rows before `train_end` that a server needs to compute features of later
    transactions.

    `rows`: all rows of complete cards, sorted by (card, time, id).
    """
    is_past = rows.time < train_end
    # for each row, the end index of its card
    last = np.searchsorted(rows.card, rows.card, side="right")
    later = np.append(0, np.cumsum(~is_past))
    from_end = last - np.arange(len(rows)) - (later[last] - later[np.arange(len(rows))])
    recent = rows.time >= train_end - lookback_days(delay_days) * DAY
    return is_past & (recent | (from_end <= CONTEXT))


class Settings(BaseModel):
    """The content of state.json."""

    model_config = ConfigDict(frozen=True)

    features: tuple[str, ...]
    train_end: int  # µs since the epoch
    label_delay_days: int


def write(path: Path, rows: Rows, features: Floats, trees: Trees, facts: dict[str, Any]) -> None:
    """Write the state directory, with the rows that `needed` selects, their features, the trees and
    the settings."""
    path.mkdir()
    for name in COLUMNS:
        np.save(path / f"{name}.npy", getattr(rows, name))
    np.save(path / "features.npy", features)
    trees.save(path / "trees.npz")
    (path / "state.json").write_text(
        Settings.model_validate(facts).model_dump_json(indent=1) + "\n"
    )


def load_trained(path: Path) -> dict[str, NDArray[Any]]:
    """Load the arrays `id` and `boosted`: the last training rows of a release, and their log-odds.
    Raises DataError.

    These log-odds cannot be computed again, because a release does not contain the trees of the
    folds. A refreshed state lacks some of these rows, so it stores the log-odds in a separate file.
    """
    try:
        if (path / TRAINED).exists():
            with np.load(path / TRAINED) as arrays:
                return {name: arrays[name] for name in ("id", "boosted")}

        return {"id": np.load(path / "id.npy"), "boosted": np.load(path / "features.npy")[:, -1]}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is not a complete serving state ({error}): release the model again."
        ) from error


@dataclass(frozen=True)
class State:
    """The transactions before the end of training that a server needs, sorted by card and also by
    terminal."""

    rows: Rows  # sorted by (card, time, id)
    table: Floats  # features of the rows: float32 [n, F]
    trees: Trees
    by_terminal: Ints  # indices of the rows, sorted by (terminal, time, id)
    terminals: Ints  # terminal of each row, in the order of `by_terminal`
    features: tuple[str, ...]
    train_end: int  # µs since the epoch
    label_delay_days: int

    @classmethod
    def load(cls, path: Path) -> "State":
        """Load the state directory `path`. Raises DataError."""
        try:
            settings = Settings.model_validate_json((path / "state.json").read_bytes())
            rows = Rows(**{name: np.load(path / f"{name}.npy") for name in COLUMNS})
            table = np.load(path / "features.npy")
            trees = Trees.load(path / "trees.npz")
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is not a complete serving state ({error}): release the model again."
            ) from error

        if settings.features != (*NAMES, BOOSTED):
            raise DataError(
                f"{path} was written with other features: prepare the data, and train and release"
                " the model again."
            )

        order = np.lexsort((rows.id, rows.time, rows.terminal))
        by_terminal = rows.terminal[order]

        return cls(
            rows,
            table,
            trees,
            order,
            by_terminal,
            settings.features,
            settings.train_end,
            settings.label_delay_days,
        )

    def windows(
        self, requests: Sequence[tuple[Rows, Rows]], length: int = CONTEXT + 1
    ) -> tuple[Floats, Ints]:
        """Return the windows (float32 [B, length, F]) and their lengths (int64 [B]), as the module
        docstring describes, in the order of the new rows.

        Raises DataError if a new transaction is older than the state, or two new transactions of a
        request have the same id.
        """
        tables = [self._select_later(new, history) for new, history in requests]
        later = Rows.concat(tables)
        sizes = [len(rows) for rows in tables]
        request = np.repeat(np.arange(len(tables)), sizes)
        old = [len(rows) - len(new) for rows, (new, _) in zip(tables, requests, strict=True)]
        is_new = np.concatenate([np.arange(size) for size in sizes]) >= np.repeat(old, sizes)

        group, cards = _group_by_request(later.card, request)
        groups = np.unique(group[is_new])
        of_cards = np.flatnonzero(np.isin(group, groups))
        past, counts = _find_members(self.rows.card, cards[groups % len(cards)])
        rows = Rows.concat([self.rows[past], later[of_cards]])
        rows = replace(rows, card=np.concatenate([np.repeat(groups, counts), group[of_cards]]))
        order = np.lexsort((rows.id, rows.time, rows.card))
        # positions in `order` of rows from requests, not from the state
        later_rows = np.argsort(order)[len(past) :]
        columns = card_features(rows[order], row_indices=later_rows)
        columns.update(self._terminal_columns(later, request, of_cards))
        later_table = matrix(columns, NAMES)
        later_table = np.column_stack([later_table, self.trees.score(later_table)])
        table = np.concatenate([self.table[past], later_table])[order]

        end = later_rows[is_new[of_cards]]
        start = np.maximum(np.searchsorted(rows.card[order], group[is_new]), end - length + 1)
        index = start[:, None] + np.arange(length)
        windows = table[np.minimum(index, end[:, None])]
        windows[index > end[:, None]] = 0

        return windows, end - start + 1

    def _select_later(self, new: Rows, history: Rows) -> Rows:
        """Return the rows of a request that are later than the state: first the history, then the
        new rows."""
        if len(set(new.id.tolist())) < len(new):
            raise DataError(
                "two of the transactions to score have the same id: each transaction must have its"
                " own id."
            )

        if (new.time < self.train_end).any():
            raise DataError(
                f"a transaction of {format_instant(new.time.min())} UTC is older than the end of"
                f" the state of this model, {format_instant(self.train_end)} UTC: only later"
                " transactions can be"
                " scored."
            )

        if not len(history):
            return new

        return Rows.concat(
            [history[(history.time >= self.train_end) & ~np.isin(history.id, new.id)], new]
        )

    def _terminal_columns(self, later: Rows, request: Ints, index: Ints) -> dict[str, NDArray[Any]]:
        """Compute the features TERMINAL_NAMES of the rows `index` of `later`."""
        group, terminals = _group_by_request(later.terminal, request)
        groups = np.unique(group[index])
        of_terminals = np.flatnonzero(np.isin(group, groups))
        members, counts = _find_members(self.terminals, terminals[groups % len(terminals)])
        past = self.by_terminal[members]
        rows = Rows.concat([self.rows[past], later[of_terminals]])
        rows = replace(
            rows, terminal=np.concatenate([np.repeat(groups, counts), group[of_terminals]])
        )
        order = np.lexsort((rows.id, rows.time, rows.terminal))
        places = np.argsort(order)[len(past) :][np.searchsorted(of_terminals, index)]

        return {
            name: values[places]
            for name, values in terminal_features(rows[order], self.label_delay_days).items()
        }


def _group_by_request(ids: Ints, request: Ints) -> tuple[Ints, Ints]:
    """Assign a number to each pair of request and id.

    Return (numbers, unique ids); number % len(unique ids) is the index of the id.
    """
    unique_ids, index = np.unique(ids, return_inverse=True)
    return request * len(unique_ids) + index, unique_ids


def _find_members(groups: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """Return two arrays: the indices in the sorted `groups` of all members of the `chosen` groups,
    and the sizes of these groups."""
    start = np.searchsorted(groups, chosen)
    sizes = np.searchsorted(groups, chosen, side="right") - start
    return np.repeat(start - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum()), sizes
