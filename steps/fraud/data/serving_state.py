"""The serving state: the transactions before the end of training that servers need for the features
of later transactions.

    state = State.load(release / "state")
    windows, lengths = state.windows([(new, history)])     # float32 [B, 64, F], int64 [B]

Each pair (new, history) is an independent request. The first element contains the transactions to
score (steps.fraud.data.transactions.Rows, for example from `Rows.of(id=[..], time=[..], card=[..],
terminal=[..], amount=[..])`), and the second element contains the transactions since the end of
training, which the client sends with the labels that it knows (fraud=0 if a label is unknown;
labels younger than the label delay are ignored). Window b contains the features (columns
`state.features`) of the last `length` transactions of the card up to the b-th new row: oldest
first, the new row at position lengths[b] - 1, then zeros. If the history is complete, the features
in a window equal the features that `prepare` computes, because the code is the same. The method
`windows` stores nothing, so several threads may call it in parallel.
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


def needed(transactions: Rows, train_end: int, delay_days: int) -> NDArray[np.bool_]:
    """Return a mask of the rows before `train_end` that a server needs to compute features of later
    transactions.

    `transactions`: all rows of complete cards, sorted by (card, time, id).
    """
    is_past = transactions.time < train_end
    # for each row, the end index of its card
    end_of_card = np.searchsorted(transactions.card, transactions.card, side="right")
    later_row_counts = np.append(0, np.cumsum(~is_past))
    distance_from_end = (
        end_of_card
        - np.arange(len(transactions))
        - (later_row_counts[end_of_card] - later_row_counts[np.arange(len(transactions))])
    )
    is_recent = transactions.time >= train_end - lookback_days(delay_days) * DAY
    return is_past & (is_recent | (distance_from_end <= CONTEXT))


class Settings(BaseModel):
    """The content of state.json."""

    model_config = ConfigDict(frozen=True)

    features: tuple[str, ...]
    # µs since the epoch
    train_end: int
    label_delay_days: int


def write(
    state_folder: Path,
    needed_rows: Rows,
    feature_table: Floats,
    decision_trees: Trees,
    dataset_facts: dict[str, Any],
) -> None:
    """Write the state directory, with the rows that `needed` selects, their features, the trees and
    the settings."""
    state_folder.mkdir()
    for column_name in COLUMNS:
        np.save(state_folder / f"{column_name}.npy", getattr(needed_rows, column_name))
    np.save(state_folder / "features.npy", feature_table)
    decision_trees.save(state_folder / "trees.npz")
    (state_folder / "state.json").write_text(
        Settings.model_validate(dataset_facts).model_dump_json(indent=1) + "\n"
    )


def load_trained(state_folder: Path) -> dict[str, NDArray[Any]]:
    """Load the arrays `id` and `boosted`: the last training rows of a release, and their log-odds.
    Raises DataError.

    The log-odds of training rows cannot be computed again, because a release does not contain the
    trees of the folds. A refreshed state lacks some of the training rows, so it stores the log-odds
    in a separate file.
    """
    try:
        if (state_folder / TRAINED).exists():
            with np.load(state_folder / TRAINED) as stored_arrays:
                return {array_name: stored_arrays[array_name] for array_name in ("id", "boosted")}

        return {
            "id": np.load(state_folder / "id.npy"),
            "boosted": np.load(state_folder / "features.npy")[:, -1],
        }
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{state_folder} is not a complete serving state ({error}): release the model again."
        ) from error


@dataclass(frozen=True)
class State:
    """The transactions before the end of training that a server needs, sorted by card and also by
    terminal."""

    # sorted by (card, time, id)
    rows: Rows
    # features of the rows: float32 [n, F]
    table: Floats
    trees: Trees
    # indices of the rows, sorted by (terminal, time, id)
    by_terminal: Ints
    # terminal of each row, in the order of `by_terminal`
    terminals: Ints
    features: tuple[str, ...]
    # µs since the epoch
    train_end: int
    label_delay_days: int

    @classmethod
    def load(cls, state_folder: Path) -> "State":
        """Load the state directory `state_folder`. Raises DataError."""
        try:
            state_settings = Settings.model_validate_json(
                (state_folder / "state.json").read_bytes()
            )
            state_rows = Rows(
                **{
                    column_name: np.load(state_folder / f"{column_name}.npy")
                    for column_name in COLUMNS
                }
            )
            feature_table = np.load(state_folder / "features.npy")
            decision_trees = Trees.load(state_folder / "trees.npz")
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{state_folder} is not a complete serving state ({error}): release the model"
                " again."
            ) from error

        if state_settings.features != (*NAMES, BOOSTED):
            raise DataError(
                f"{state_folder} was written with other features: prepare the data, and train and"
                " release the model again."
            )

        sort_order = np.lexsort((state_rows.id, state_rows.time, state_rows.terminal))
        rows_by_terminal = state_rows.terminal[sort_order]

        return cls(
            state_rows,
            feature_table,
            decision_trees,
            sort_order,
            rows_by_terminal,
            state_settings.features,
            state_settings.train_end,
            state_settings.label_delay_days,
        )

    def windows(
        self, requests: Sequence[tuple[Rows, Rows]], window_length: int = CONTEXT + 1
    ) -> tuple[Floats, Ints]:
        """Return the windows (float32 [B, length, F]) and their lengths (int64 [B]), as the module
        docstring describes, in the order of the new rows.

        Raises DataError if a new transaction is older than the state, or two new transactions of a
        request have the same id.
        """
        later_rows_by_request = [
            self._select_later(new_rows, history_rows) for new_rows, history_rows in requests
        ]
        all_later_rows = Rows.concat(later_rows_by_request)
        row_counts = [len(joined_rows) for joined_rows in later_rows_by_request]
        request_numbers = np.repeat(np.arange(len(later_rows_by_request)), row_counts)
        history_row_counts = [
            len(joined_rows) - len(new_rows)
            for joined_rows, (new_rows, _) in zip(later_rows_by_request, requests, strict=True)
        ]
        is_new = np.concatenate(
            [np.arange(request_row_count) for request_row_count in row_counts]
        ) >= np.repeat(history_row_counts, row_counts)

        card_group_ids, card_ids = _group_by_request(all_later_rows.card, request_numbers)
        new_card_groups = np.unique(card_group_ids[is_new])
        rows_of_cards = np.flatnonzero(np.isin(card_group_ids, new_card_groups))
        past_row_indices, past_row_counts = _find_members(
            self.rows.card, card_ids[new_card_groups % len(card_ids)]
        )
        joined_rows = Rows.concat([self.rows[past_row_indices], all_later_rows[rows_of_cards]])
        joined_rows = replace(
            joined_rows,
            card=np.concatenate(
                [np.repeat(new_card_groups, past_row_counts), card_group_ids[rows_of_cards]]
            ),
        )
        sort_order = np.lexsort((joined_rows.id, joined_rows.time, joined_rows.card))
        # positions of the requests' rows among the sorted rows, which also come from the state
        later_rows = np.argsort(sort_order)[len(past_row_indices) :]
        card_columns = card_features(joined_rows[sort_order], row_indices=later_rows)
        card_columns.update(
            self._compute_terminal_columns(all_later_rows, request_numbers, rows_of_cards)
        )
        later_table = matrix(card_columns, NAMES)
        later_table = np.column_stack([later_table, self.trees.score(later_table)])
        joined_table = np.concatenate([self.table[past_row_indices], later_table])[sort_order]

        window_ends = later_rows[is_new[rows_of_cards]]
        window_starts = np.maximum(
            np.searchsorted(joined_rows.card[sort_order], card_group_ids[is_new]),
            window_ends - window_length + 1,
        )
        window_row_indices = window_starts[:, None] + np.arange(window_length)
        feature_windows = joined_table[np.minimum(window_row_indices, window_ends[:, None])]
        feature_windows[window_row_indices > window_ends[:, None]] = 0

        return feature_windows, window_ends - window_starts + 1

    def _select_later(self, new_rows: Rows, history_rows: Rows) -> Rows:
        """Return the rows of a request that are later than the state: first the history, then the
        new rows."""
        if len(set(new_rows.id.tolist())) < len(new_rows):
            raise DataError(
                "two of the transactions to score have the same id: each transaction must have its"
                " own id."
            )

        if (new_rows.time < self.train_end).any():
            raise DataError(
                f"a transaction of {format_instant(new_rows.time.min())} UTC is older than the end"
                f" of the state of this model, {format_instant(self.train_end)} UTC: only later"
                " transactions can be scored."
            )

        if not len(history_rows):
            return new_rows

        return Rows.concat(
            [
                history_rows[
                    (history_rows.time >= self.train_end) & ~np.isin(history_rows.id, new_rows.id)
                ],
                new_rows,
            ]
        )

    def _compute_terminal_columns(
        self, later_rows: Rows, request_numbers: Ints, row_indices: Ints
    ) -> dict[str, NDArray[Any]]:
        """Compute the features TERMINAL_NAMES of the rows `row_indices` of `later_rows`."""
        terminal_group_ids, terminal_ids = _group_by_request(later_rows.terminal, request_numbers)
        terminal_groups = np.unique(terminal_group_ids[row_indices])
        rows_of_terminals = np.flatnonzero(np.isin(terminal_group_ids, terminal_groups))
        member_indices, member_counts = _find_members(
            self.terminals, terminal_ids[terminal_groups % len(terminal_ids)]
        )
        past_row_indices = self.by_terminal[member_indices]
        joined_rows = Rows.concat([self.rows[past_row_indices], later_rows[rows_of_terminals]])
        joined_rows = replace(
            joined_rows,
            terminal=np.concatenate(
                [np.repeat(terminal_groups, member_counts), terminal_group_ids[rows_of_terminals]]
            ),
        )
        sort_order = np.lexsort((joined_rows.id, joined_rows.time, joined_rows.terminal))
        sorted_positions = np.argsort(sort_order)[len(past_row_indices) :][
            np.searchsorted(rows_of_terminals, row_indices)
        ]

        return {
            feature_name: feature_values[sorted_positions]
            for feature_name, feature_values in terminal_features(
                joined_rows[sort_order], self.label_delay_days
            ).items()
        }


def _group_by_request(ids: Ints, request_numbers: Ints) -> tuple[Ints, Ints]:
    """Assign a number to each pair of request and id, so that rows of different requests are never
    in one group.

    Return (numbers, unique ids). `number % len(unique_ids)` is the index of the id in the unique
    ids.
    """
    unique_ids, id_indices = np.unique(ids, return_inverse=True)
    return request_numbers * len(unique_ids) + id_indices, unique_ids


def _find_members(sorted_group_ids: Ints, chosen_groups: Ints) -> tuple[Ints, Ints]:
    """Return two arrays: the indices in `sorted_group_ids` of all members of the groups
    `chosen_groups`, and the sizes of these groups."""
    start_positions = np.searchsorted(sorted_group_ids, chosen_groups)
    group_sizes = np.searchsorted(sorted_group_ids, chosen_groups, side="right") - start_positions
    return np.repeat(
        start_positions - np.cumsum(group_sizes) + group_sizes, group_sizes
    ) + np.arange(group_sizes.sum()), group_sizes
