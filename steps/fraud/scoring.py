"""Score raw transactions with a released model.

A request is {"instances": [{transaction_id, time, card, terminal, amount}], "history": [...]}. Rows
of `history` also have the field "fraud" once their label is known. A prediction is the probability
of fraud. `history` contains the transactions between the end of the training data and the
instances. A score is exact if `history` has all rows of the scored cards, and of all terminals in
these rows and in the instances.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator

from rekindle.errors import DataError
from steps.fraud.data.features import Floats
from steps.fraud.data.row_checks import MAX_AMOUNT
from steps.fraud.data.serving_state import State
from steps.fraud.data.transactions import DAY, Ints, Rows, format_instant, identity
from steps.fraud.fraud_config import MAX_HISTORY
from steps.fraud.models import load, score_windows

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# windows per forward pass; fixed, so that the bits of a score do not depend on other requests
BATCH = 8
# a request without history causes a warning only if it is longer than this after the end of the
# state
MAX_WITHOUT_HISTORY = DAY
# narrower models score single windows, because the position in a batch would change bits of their
# scores
MIN_BATCH_WIDTH = 16


def _identity(value: object) -> int:
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if isinstance(value, str) and (text := value.strip()):
        return identity(text)
    raise ValueError("it must be a whole number of 64 bits or non-empty text")


def _time(value: Any) -> int:
    try:
        time = datetime.fromisoformat(value)
        return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH) // timedelta(
            microseconds=1
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "it must be ISO 8601 text such as 2024-04-01T12:00:00 (UTC unless it names a zone)"
        ) from error


def _amount(value: Any) -> float:
    if type(value) in (int, float) and math.isfinite(value) and 0 <= value <= MAX_AMOUNT:
        return value
    raise ValueError(f"it must be a number from 0 to {MAX_AMOUNT:,.0f}")


def _label(value: object) -> int:
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return int(value or 0)
    raise ValueError("it must be 1 or 0, or left out if the label is not known yet")


Identity = Annotated[
    int, PlainValidator(_identity), WithJsonSchema({"type": ["integer", "string"]})
]
Time = Annotated[
    int, PlainValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})
]
Amount = Annotated[
    float,
    PlainValidator(_amount),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_AMOUNT}),
]
Label = Annotated[int, PlainValidator(_label), WithJsonSchema({"enum": [0, 1, None]})]


class Transaction(BaseModel):
    """A transaction to score. Ids are integers or text; `time` is in UTC unless it contains a time
    zone."""

    transaction_id: Identity
    time: Time
    card: Identity
    terminal: Identity
    amount: Amount = Field(description="amount in units of the currency")


class PastTransaction(Transaction):
    """A transaction of the request's history, from after the end of the training data."""

    fraud: Label = Field(0, description="1 or 0; left out if the label is not known yet")


class Request(BaseModel):
    """A request for scores."""

    instances: list[Transaction] = Field(min_length=1)
    history: list[PastTransaction] = Field([], max_length=MAX_HISTORY)

    @model_validator(mode="after")
    def _check_unique_ids(self) -> Self:
        for name, transactions in (("instances", self.instances), ("history", self.history)):
            indices: dict[int, int] = {}
            for index, transaction in enumerate(transactions):
                first = indices.setdefault(transaction.transaction_id, index)
                if first != index:
                    raise ValueError(
                        f"{name}[{index}].transaction_id equals {name}[{first}]'s: each"
                        " transaction_id must be unique"
                    )
        return self


class FraudPredictor:
    """A released model with its serving state. Implements Predictor of rekindle/workload.py."""

    Request = Request

    def __init__(self, release: Path) -> None:
        self.model = load(release)
        self.batch = BATCH if self.model.width >= MIN_BATCH_WIDTH else 1
        self.state = State.load(release / "state")
        if tuple(self.model.feature_names) != self.state.features:
            raise DataError(
                f"{release}: the model and the serving state have different features. Release the"
                " model again."
            )

    def example(self) -> dict[str, Any]:
        """Return a request with one made-up transaction."""
        time = format_instant(self.state.train_end)
        return {
            "instances": [
                {"transaction_id": 1, "time": time, "card": 7, "terminal": 9, "amount": 250.0}
            ]
        }

    def predict(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return the probability of fraud of each instance. Raises DataError if an instance is
        older than the state."""
        pairs = zip(
            rows([r.instances for r in requests]), rows([r.history for r in requests]), strict=True
        )
        scores = iter(self._scores(*self.state.windows(list(pairs), self.model.reach + 1)))
        return [[next(scores) for _ in request.instances] for request in requests]

    def warn(self, request: Request) -> str:
        """Return a warning if the history is missing and an instance is long after the end of the
        state; otherwise ""."""
        end = self.state.train_end

        newest = max(transaction.time for transaction in request.instances)
        if newest - end <= MAX_WITHOUT_HISTORY or any(
            payment.time >= end for payment in request.history
        ):
            return ""

        days = (newest - end) / DAY

        return (
            f"the history is missing: the model knows the payments until {format_instant(end)} UTC,"
            f" {days:.1f} days before the newest transaction, so its scores are worse. Send the"
            " later payments of the cards and terminals in `history`, or refresh the model."
        )

    def _scores(self, windows: Floats, lengths: Ints) -> list[float]:
        """Return the probability of fraud of the last row of each window. The last batch is padded
        with copies of the last window."""
        count = len(lengths)
        padded_index = np.minimum(np.arange(-(-count // self.batch) * self.batch), count - 1)
        batches = zip(
            *(torch.from_numpy(a[padded_index]).split(self.batch) for a in (windows, lengths)),
            strict=True,
        )
        return torch.cat([score_windows(self.model, *batch) for batch in batches])[:count].tolist()


def rows(requests: Sequence[Sequence[Transaction]]) -> list[Rows]:
    """Convert the transactions of each request to columns. All requests are converted in one table,
    because numpy is slow for few rows."""
    transactions = list(chain.from_iterable(requests))

    table = Rows.of(
        id=[t.transaction_id for t in transactions],
        time=[t.time for t in transactions],
        card=[t.card for t in transactions],
        terminal=[t.terminal for t in transactions],
        amount=[t.amount for t in transactions],
        fraud=[t.fraud if isinstance(t, PastTransaction) else 0 for t in transactions],
    )

    ends = list(accumulate(len(request) for request in requests))

    return [table[end - len(request) : end] for request, end in zip(requests, ends, strict=True)]
