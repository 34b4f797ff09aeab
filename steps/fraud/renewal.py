"""The serving state of a released model, brought up to newer data: the weights stay, so nothing is trained.

Later transactions get the features and the score of the trees that the server would have computed for them, had the
client sent them as `history`; labels that have arrived since are entered. An answer without history is then, bit for
bit, that of the former state with it.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from rekindle.errors import DataError
from rekindle.workload import Refreshed, dataset_facts
from steps.fraud.config import Data
from steps.fraud.data import source, state
from steps.fraud.data.checks import check
from steps.fraud.data.features import Floats, tables
from steps.fraud.data.schema import DAY, UNKNOWN, Rows, utc
from steps.fraud.data.shards import last_full_day

CHUNK = 4096  # rows that the trees score at once
SAMPLE = 50  # transactions of the newest day that a server must score as this does


def refresh(release: Path, data: Data, out: Path) -> Refreshed | None:
    """The state of `release` with the transactions of `data` since then; None if there are none.

    Raises DataError if rows between the state and the data are missing.
    """
    former = state.State.load(release / "state")
    checked = check(source.read(data, out / "download"), data.columns, data.tolerated_rejects, data.text)
    rows = checked.rows
    until = (last_full_day(rows.time) + 1) * DAY
    if until <= former.train_end:
        return None
    if rows.time[0] >= former.train_end + DAY:
        raise DataError(
            f"{data.source} begins at {utc(rows.time[0])}, and the model knows transactions until "
            f"{utc(former.train_end)}: what lies between is missing. Give data from then on."
        )
    later = rows[(rows.time >= former.train_end) & (rows.time < until)]
    kept, table = extended(former, labelled(former.rows, rows), later, until)
    facts = {"features": list(former.features), "train_end": until, "label_delay_days": former.label_delay_days}
    digest = json.loads((release / "state/state.json").read_text())["digest"]
    state.write(out / "state", kept, table, former.trees, facts | {"digest": digest})
    np.savez(out / "state" / state.TRAINED, allow_pickle=False, **state.trained(release / "state"))
    newest = later[-SAMPLE:]
    columns = zip(newest.card.tolist(), newest.terminal.tolist(), newest.cents.tolist(), strict=True)
    instances = [
        {"transaction_id": number, "time": utc(until), "card": card, "terminal": terminal, "amount": cents / 100}
        for number, (card, terminal, cents) in enumerate(columns)
    ]
    return Refreshed(len(later), dataset_facts(release) | {"data_until": utc(until)}, instances)


def labelled(old: Rows, new: Rows) -> Rows:
    """The old rows, with the labels that the new ones of the same ids know."""
    known = new[new.fraud != UNKNOWN]
    order = np.argsort(known.id)
    place = np.minimum(np.searchsorted(known.id, old.id, sorter=order), max(0, len(known) - 1))
    if not len(known):
        return old
    match = order[place]
    return replace(old, fraud=np.where(known.id[match] == old.id, known.fraud[match], old.fraud).astype(np.uint8))


def extended(former: state.State, old: Rows, later: Rows, until: int) -> tuple[Rows, Floats]:
    """What a server needs from `until` on: rows sorted by (card, time, id), and their features."""
    rows = Rows.concat([old, later])
    number = np.arange(len(rows))  # a row of `old` keeps the features that it was served with
    order = np.lexsort((rows.id, rows.time))
    numbered = replace(rows, scenario=number)[order]
    parts: list[Rows] = []
    features: list[Floats] = []
    for part, table in tables(numbered, former.label_delay_days):
        scored = np.column_stack([table, np.zeros(len(table), np.float32)])
        at = part.scenario.astype(np.int64)
        scored[at < len(old)] = former.table[at[at < len(old)]]
        for new in np.array_split(np.flatnonzero(at >= len(old)), 1 + len(at) // CHUNK):
            scored[new, -1] = former.trees.score(table[new])
        keep = state.needed(part, until, former.label_delay_days)
        parts.append(rows[at[keep]])
        features.append(scored[keep])
    return Rows.concat(parts), np.concatenate(features)
