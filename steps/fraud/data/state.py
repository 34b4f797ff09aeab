"""What a server knows at the end of training, and the features of later transactions made from it.

    state = State.load(release / "state")
    windows, lengths = state.windows(new, history)     # float32 [B, 64, F], int64 [B]

`new` are the transactions to score (steps.fraud.data.schema.Rows, e.g. by `Rows.of(id=[..], time=[..], card=[..],
terminal=[..], amount=[..])`), `history` those between the end of training and now, as far as the client sends them,
with the labels that are known by now (fraud=0 otherwise: a label younger than the delay is never looked at). Window b
holds the feature rows of the card's last `length` transactions up to and including new row b, oldest first, the new
one at position lengths[b] - 1, zeros behind; columns are `state.features`. With complete history the values are those
that `prepare` computes, because it is the same code. Nothing is kept between calls; calls may run in parallel
threads.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import DataError
from steps.fraud.config import CONTEXT
from steps.fraud.data.features import NAMES, Floats, card_features, lookback_days, matrix, terminal_features
from steps.fraud.data.schema import DAY, Ints, Rows
from steps.fraud.data.schema import NAMES as COLUMNS


def needed(rows: Rows, train_end: int, delay_days: int) -> NDArray[np.bool_]:
    """Which of the rows (sorted by (card, time, id), whole cards) a server needs from `train_end` on."""
    before = rows.time < train_end
    last = np.searchsorted(rows.card, rows.card, side="right")  # one past the card's last row
    later = np.append(0, np.cumsum(~before))
    from_end = last - np.arange(len(rows)) - (later[last] - later[np.arange(len(rows))])
    recent = rows.time >= train_end - lookback_days(delay_days) * DAY
    return before & (recent | (from_end <= CONTEXT))


def write(path: Path, rows: Rows, features: Floats, facts: dict[str, Any]) -> None:
    """The state directory: the rows that are `needed`, their features, and the facts that features depend on."""
    path.mkdir()
    for name in COLUMNS:
        np.save(path / f"{name}.npy", getattr(rows, name))
    np.save(path / "features.npy", features)
    keep = ("features", "train_end", "label_delay_days", "amount_limit", "digest")
    (path / "state.json").write_text(json.dumps({name: facts[name] for name in keep}, indent=1) + "\n")


@dataclass(frozen=True)
class State:
    """Transactions of the last weeks of training, by card and by terminal."""

    rows: Rows  # sorted by (card, time, id)
    table: Floats  # float32 [n, F]: their features
    by_terminal: Ints  # order of the rows by (terminal, time, id)
    terminals: Ints  # the terminals in that order
    features: tuple[str, ...]
    train_end: int  # µs since the epoch
    label_delay_days: int
    amount_limit: float

    @classmethod
    def load(cls, path: Path) -> "State":
        """The state directory at `path`. Raises DataError."""
        try:
            facts = json.loads((path / "state.json").read_text())
            rows = Rows(**{name: np.load(path / f"{name}.npy") for name in COLUMNS})
            table = np.load(path / "features.npy")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a whole serving state ({error}): release the model again.") from error
        if tuple(facts["features"]) != NAMES:
            raise DataError(f"{path} was made by another version of the features: prepare and release again.")
        order = np.lexsort((rows.id, rows.time, rows.terminal))
        settings = (facts[name] for name in ("train_end", "label_delay_days", "amount_limit"))
        return cls(rows, table, order, rows.terminal[order], NAMES, *settings)

    def windows(self, new: Rows, history: Rows | None = None, length: int = CONTEXT + 1) -> tuple[Floats, Ints]:
        """(float32 [B, length, F], int64 [B]) as above, in the order of `new`.

        Raises DataError if a new transaction is older than the state, or two have the same id.
        """
        later = self._later(new, history)
        mine = np.flatnonzero(np.isin(later.card, new.card))
        past = _members(self.rows.card, new.card)
        rows = Rows.concat([self.rows[past], later[mine]])
        order = np.lexsort((rows.id, rows.time, rows.card))
        place = np.argsort(order)  # of each row in that order

        fresh = place[len(past) :]
        columns = {name: values[fresh] for name, values in card_features(rows[order], self.amount_limit).items()}
        columns |= self._terminal_columns(later, mine)
        table = np.concatenate([self.table[past], matrix(columns, NAMES)])[order]

        at = place[len(rows) - len(new) :]
        start = np.maximum(np.searchsorted(rows.card[order], new.card), at - length + 1)
        index = start[:, None] + np.arange(length)
        windows = table[np.minimum(index, at[:, None])]
        windows[index > at[:, None]] = 0
        return windows, at - start + 1

    def _later(self, new: Rows, history: Rows | None) -> Rows:
        """All rows since the state, the new ones last."""
        if len(np.unique(new.id)) < len(new):
            raise DataError("two of the transactions to score have the same id: each must have its own.")
        if (new.time < self.train_end).any():
            raise DataError(
                f"a transaction of {_shown(new.time.min())} is older than the state of this model, which begins at "
                f"{_shown(self.train_end)}: only later ones can be scored."
            )
        if history is None:
            return new
        return Rows.concat([history[(history.time >= self.train_end) & ~np.isin(history.id, new.id)], new])

    def _terminal_columns(self, later: Rows, mine: Ints) -> dict[str, NDArray[Any]]:
        """The features OF_TERMINAL of the rows `mine` of `later`."""
        terminals = later.terminal[mine]
        theirs = np.flatnonzero(np.isin(later.terminal, terminals))
        past = self.by_terminal[_members(self.terminals, terminals)]
        rows = Rows.concat([self.rows[past], later[theirs]])
        order = np.lexsort((rows.id, rows.time, rows.terminal))
        place = np.argsort(order)[len(past) :][np.searchsorted(theirs, mine)]
        return {name: values[place] for name, values in terminal_features(rows[order], self.label_delay_days).items()}


def _members(groups: Ints, wanted: Ints) -> Ints:
    """Where the sorted `groups` hold one of `wanted`."""
    wanted = np.unique(wanted)
    edges = zip(np.searchsorted(groups, wanted), np.searchsorted(groups, wanted, side="right"), strict=True)
    return np.concatenate([np.arange(start, end) for start, end in edges])


def _shown(time: Any) -> str:
    return f"{np.datetime64(int(time), 'us').astype('datetime64[s]')} UTC"
