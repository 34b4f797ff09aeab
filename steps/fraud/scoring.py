"""Scoring raw transactions: the server's half of the model.

A request: {"transactions": [{transaction_id, time, card, terminal, amount}], "history": [the same, with "fraud" once
it is known]}. `time` is ISO 8601 (UTC if it names no zone), ids are whole numbers or text, `amount` is in units.
`history` is what happened between the end of the training data and the transactions. A score is exact if it holds the
rows of the cards to be scored, and of every terminal that these rows and the transactions name.
"""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.errors import DataError, did_you_mean
from steps.fraud.data.checks import HIGHEST
from steps.fraud.data.schema import Rows, identity
from steps.fraud.data.state import State
from steps.fraud.transformer import load, score_windows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FraudScorer:
    """A released model with its serving state; see rekindle/workload.py."""

    def __init__(self, release: Path) -> None:
        self.model = load(release)
        self.state = State.load(release / "state")
        if tuple(self.model.feature_names) != self.state.features:
            raise DataError(f"{release}: the model and its serving state have other features. Release the model again.")

    def example(self) -> dict[str, Any]:
        """A request with one made-up transaction."""
        time = str(np.datetime64(self.state.train_end, "us").astype("datetime64[s]"))
        return {"transactions": [{"transaction_id": 1, "time": time, "card": 7, "terminal": 9, "amount": 250.0}]}

    def score(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """[{transaction_id, score}] in the order of the request. Raises DataError that names the wrong value."""
        transactions = request["transactions"]
        new = parse("transactions", transactions, FIELDS)
        history = parse("history", request.get("history", []), FIELDS | LABEL)
        windows, lengths = self.state.windows(new, history, self.model.reach + 1)
        scores = score_windows(self.model, torch.from_numpy(windows), torch.from_numpy(lengths)).tolist()
        ids = (record["transaction_id"] for record in transactions)
        return [{"transaction_id": i, "score": s} for i, s in zip(ids, scores, strict=True)]


def parse(name: str, records: list[Any], fields: dict[str, Callable[[Any], Any]]) -> Rows:
    """The records of a request as rows. Raises DataError with the place, the value and the rule."""
    columns: dict[str, list[Any]] = {field: [] for field in fields}
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{name}[{index}] is {_shown(record)}: it must be an object with {', '.join(FIELDS)}.")
        for field, convert in fields.items():
            try:
                columns[field].append(convert(record.get(field)))
            except ValueError as rule:
                what = f"is {_shown(record[field])}" if field in record else "is missing"
                raise DataError(f"{name}[{index}].{field} {what}: it must be {rule}.") from rule
        if unknown := record.keys() - fields.keys():
            key = min(unknown)
            raise DataError(f'{name}[{index}] has "{key[:60]}", which is not known.{did_you_mean(key, set(fields))}')
    ids, first = np.unique(np.array(columns["transaction_id"], np.int64), return_index=True)
    if len(ids) < len(records):
        index = min(set(range(len(records))) - set(first.tolist()))
        value = _shown(records[index]["transaction_id"])
        raise DataError(f"{name}[{index}].transaction_id is {value}: it must be unique, and it was there before.")
    return Rows.of(columns.pop("transaction_id"), **columns)


def _identity(value: Any) -> int:
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if isinstance(value, str) and (text := value.strip()):
        return identity(text)
    raise ValueError("a whole number of 64 bits or text that is not empty")


def _time(value: Any) -> int:
    try:
        time = datetime.fromisoformat(value)
        return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH) // timedelta(microseconds=1)
    except (TypeError, ValueError) as error:
        raise ValueError("ISO 8601 text such as 2024-04-01T12:00:00 (UTC unless it names a zone)") from error


def _amount(value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value) and 0 <= value <= HIGHEST:
        return value
    raise ValueError(f"a number from 0 to {HIGHEST:,.0f}")


def _label(value: Any) -> int:
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return int(value or 0)
    raise ValueError("1 or 0, and left out where it is not known yet")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


FIELDS: dict[str, Callable[[Any], Any]] = {
    "transaction_id": _identity,
    "time": _time,
    "card": _identity,
    "terminal": _identity,
    "amount": _amount,
}
LABEL: dict[str, Callable[[Any], Any]] = {"fraud": _label}
