"""Update the serving state of a released model with newer data; the model's weights stay unchanged.

Newer transactions get the features and tree scores that a server would compute for them as
`history` of a request, and the labels that have become known. With the new state, a request need
not contain the newer transactions in `history`. The prediction has the same bits as with the
previous state and the newer transactions in `history`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rekindle.errors import DataError
from rekindle.workload import Refreshed, read_dataset_facts
from steps.fraud.data import serving_state, source
from steps.fraud.data.boosting import write_arrays
from steps.fraud.data.features import Floats, tables
from steps.fraud.data.row_checks import check
from steps.fraud.data.shards import last_full_day
from steps.fraud.data.transactions import DAY, UNKNOWN, Rows, format_utc
from steps.fraud.fraud_config import Data

# number of rows that the trees score in one call
CHUNK = 4096
# number of newest transactions that are sent to the servers to verify their predictions
VERIFIED_TRANSACTIONS = 50


def refresh(release_folder: Path, data_settings: Data, output_folder: Path) -> Refreshed | None:
    """Write the state of `release_folder`, updated with newer transactions of `data_settings`, to
    `output_folder`; return None if no transaction is newer.

    Raises DataError if rows between the end of the state and the start of the data are missing.
    """
    current_state = serving_state.State.load(release_folder / "state")
    checked_rows = check(
        source.read(data_settings, output_folder / "download"),
        data_settings.columns,
        data_settings.tolerated_rejects,
        data_settings.text,
    )
    source_rows = checked_rows.rows

    new_state_end = (last_full_day(source_rows.time) + 1) * DAY
    if new_state_end <= current_state.train_end:
        return None

    if source_rows.time[0] >= current_state.train_end + DAY:
        raise DataError(
            f"{data_settings.source} begins at {format_utc(source_rows.time[0])}, but the state of"
            f" the model ends at {format_utc(current_state.train_end)}: the transactions in"
            " between are missing. Give data from that time on."
        )

    later_rows = source_rows[
        (source_rows.time >= current_state.train_end) & (source_rows.time < new_state_end)
    ]
    kept_rows, kept_features = extend(
        current_state, fill_labels(current_state.rows, source_rows), later_rows, new_state_end
    )

    state_facts = {
        "features": list(current_state.features),
        "train_end": new_state_end,
        "label_delay_days": current_state.label_delay_days,
    }

    serving_state.write(
        output_folder / "state", kept_rows, kept_features, current_state.trees, state_facts
    )
    write_arrays(
        output_folder / "state" / serving_state.TRAINED,
        serving_state.load_trained(release_folder / "state"),
    )
    newest_rows = later_rows[-VERIFIED_TRANSACTIONS:]
    newest_columns = zip(
        newest_rows.card.tolist(),
        newest_rows.terminal.tolist(),
        newest_rows.cents.tolist(),
        strict=True,
    )

    example_instances = [
        {
            "transaction_id": instance_number,
            "time": format_utc(new_state_end),
            "card": card,
            "terminal": terminal,
            "amount": cents / 100,
        }
        for instance_number, (card, terminal, cents) in enumerate(newest_columns)
    ]

    return Refreshed(
        len(later_rows),
        read_dataset_facts(release_folder) | {"data_until": format_utc(new_state_end)},
        example_instances,
    )


def fill_labels(old_rows: Rows, new_rows: Rows) -> Rows:
    """Return `old_rows` with the labels that the rows of the same ids have in `new_rows`, if these
    labels are known."""
    labelled_rows = new_rows[new_rows.fraud != UNKNOWN]
    id_order = np.argsort(labelled_rows.id)
    id_positions = np.minimum(
        np.searchsorted(labelled_rows.id, old_rows.id, sorter=id_order),
        max(0, len(labelled_rows) - 1),
    )

    if not len(labelled_rows):
        return old_rows

    matching_indices = id_order[id_positions]

    return replace(
        old_rows,
        fraud=np.where(
            labelled_rows.id[matching_indices] == old_rows.id,
            labelled_rows.fraud[matching_indices],
            old_rows.fraud,
        ).astype(np.uint8),
    )


def extend(
    current_state: serving_state.State, old_rows: Rows, later_rows: Rows, new_state_end: int
) -> tuple[Rows, Floats]:
    """Return the rows that a server needs after the time `new_state_end`, sorted by (card, time,
    id), and their features."""
    joined_rows = Rows.concat([old_rows, later_rows])
    # number the rows, to recognize the rows of `old_rows`, whose features stay unchanged
    row_numbers = np.arange(len(joined_rows))
    time_order = np.lexsort((joined_rows.id, joined_rows.time))
    numbered_rows = replace(joined_rows, scenario=row_numbers)[time_order]
    kept_pieces: list[Rows] = []
    kept_features: list[Floats] = []

    for piece_rows, feature_table in tables(numbered_rows, current_state.label_delay_days):
        scored_table = np.column_stack([feature_table, np.zeros(len(feature_table), np.float32)])
        piece_row_numbers = piece_rows.scenario.astype(np.int64)

        scored_table[piece_row_numbers < len(old_rows)] = current_state.table[
            piece_row_numbers[piece_row_numbers < len(old_rows)]
        ]
        for new_row_indices in np.array_split(
            np.flatnonzero(piece_row_numbers >= len(old_rows)), 1 + len(piece_row_numbers) // CHUNK
        ):
            scored_table[new_row_indices, -1] = current_state.trees.score(
                feature_table[new_row_indices]
            )

        is_needed = serving_state.needed(piece_rows, new_state_end, current_state.label_delay_days)
        kept_pieces.append(joined_rows[piece_row_numbers[is_needed]])
        kept_features.append(scored_table[is_needed])

    return Rows.concat(kept_pieces), np.concatenate(kept_features)
