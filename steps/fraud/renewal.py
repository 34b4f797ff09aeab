"""Update the serving state of a released model with newer data; its weights stay unchanged.

Newer transactions get the features and tree scores that a server would compute for them as
`history` of a request, and the labels that have become known. With the new state, a request needs
no newer transactions in `history`: its prediction is bit for bit that of the previous state with
them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rekindle.errors import DataError
from rekindle.workload import Refreshed, dataset_facts
from steps.fraud.data import serving_state, source
from steps.fraud.data.boosting import write_arrays
from steps.fraud.data.features import Floats, tables
from steps.fraud.data.row_checks import check
from steps.fraud.data.shards import last_full_day
from steps.fraud.data.transactions import DAY, UNKNOWN, Rows, format_utc
from steps.fraud.fraud_config import Data

CHUNK = 4096  # rows per call of the trees
# number of newest transactions that are sent to the servers to verify their predictions
VERIFIED_TRANSACTIONS = 50


def refresh(release: Path, data: Data, out: Path) -> Refreshed | None:
    """Write the state of `release`, updated with newer transactions of `data`, to `out`; return
    None if no transaction is newer.

    Raises DataError if rows between the end of the state and the start of the data are missing.
    """
    current = serving_state.State.load(release / "state")
    checked = check(
        source.read(data, out / "download"), data.columns, data.tolerated_rejects, data.text
    )
    rows = checked.rows

    until = (last_full_day(rows.time) + 1) * DAY
    if until <= current.train_end:
        return None

    if rows.time[0] >= current.train_end + DAY:
        raise DataError(
            f"{data.source} begins at {format_utc(rows.time[0])}, but the state of the model ends"
            f" at {format_utc(current.train_end)}: the transactions in between are missing. Give"
            " data from"
            " that time on."
        )

    later = rows[(rows.time >= current.train_end) & (rows.time < until)]
    kept, table = extend(current, fill_labels(current.rows, rows), later, until)

    facts = {
        "features": list(current.features),
        "train_end": until,
        "label_delay_days": current.label_delay_days,
    }

    serving_state.write(out / "state", kept, table, current.trees, facts)
    write_arrays(
        out / "state" / serving_state.TRAINED, serving_state.load_trained(release / "state")
    )
    newest = later[-VERIFIED_TRANSACTIONS:]
    columns = zip(
        newest.card.tolist(), newest.terminal.tolist(), newest.cents.tolist(), strict=True
    )

    instances = [
        {
            "transaction_id": number,
            "time": format_utc(until),
            "card": card,
            "terminal": terminal,
            "amount": cents / 100,
        }
        for number, (card, terminal, cents) in enumerate(columns)
    ]

    return Refreshed(
        len(later), dataset_facts(release) | {"data_until": format_utc(until)}, instances
    )


def fill_labels(old: Rows, new: Rows) -> Rows:
    """Return the `old` rows, with labels replaced by those of `new` rows with the same ids."""
    labelled = new[new.fraud != UNKNOWN]
    order = np.argsort(labelled.id)
    position = np.minimum(
        np.searchsorted(labelled.id, old.id, sorter=order), max(0, len(labelled) - 1)
    )

    if not len(labelled):
        return old

    match = order[position]

    return replace(
        old,
        fraud=np.where(labelled.id[match] == old.id, labelled.fraud[match], old.fraud).astype(
            np.uint8
        ),
    )


def extend(current: serving_state.State, old: Rows, later: Rows, until: int) -> tuple[Rows, Floats]:
    """Return the rows that a server needs from `until` on, sorted by (card, time, id), and their
    features."""
    rows = Rows.concat([old, later])
    # number the rows, to find the rows of `old`, whose features are kept
    number = np.arange(len(rows))
    order = np.lexsort((rows.id, rows.time))
    numbered = replace(rows, scenario=number)[order]
    pieces: list[Rows] = []
    features: list[Floats] = []

    for piece, table in tables(numbered, current.label_delay_days):
        scored = np.column_stack([table, np.zeros(len(table), np.float32)])
        index = piece.scenario.astype(np.int64)

        scored[index < len(old)] = current.table[index[index < len(old)]]
        for new in np.array_split(np.flatnonzero(index >= len(old)), 1 + len(index) // CHUNK):
            scored[new, -1] = current.trees.score(table[new])

        keep = serving_state.needed(piece, until, current.label_delay_days)
        pieces.append(rows[index[keep]])
        features.append(scored[keep])

    return Rows.concat(pieces), np.concatenate(features)
