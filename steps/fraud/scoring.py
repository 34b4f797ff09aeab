"""Score raw transactions with a released model.

A request is a JSON object with the lists `instances` and `history` of objects {transaction_id,
time, card, terminal, amount}. Rows of `history` also have the field "fraud" once their label is
known. A prediction is the probability that a transaction is a fraud. `history` contains the
transactions between the end of the training data and the instances. A score is exact if `history`
has all rows of the scored cards, and of all terminals in these rows and in the instances.
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
# number of windows in one forward pass, which is fixed, so that the bits of a score do not depend
# on other requests
BATCH = 8
# a request without history causes a warning only if its time is more than this after the end of the
# serving state
MAX_WITHOUT_HISTORY = DAY
# models with a smaller width score single windows, because the position in a batch would change
# bits of their scores
MIN_BATCH_WIDTH = 16


def _parse_identity(raw_identity: object) -> int:
    if type(raw_identity) is int and abs(raw_identity) < 1 << 63:
        return raw_identity
    if isinstance(raw_identity, str) and (identity_text := raw_identity.strip()):
        return identity(identity_text)
    raise ValueError("it must be a whole number of 64 bits or non-empty text")


def _parse_time(raw_time: Any) -> int:
    try:
        parsed_time = datetime.fromisoformat(raw_time)
        return (
            (parsed_time if parsed_time.tzinfo else parsed_time.replace(tzinfo=UTC)) - EPOCH
        ) // timedelta(microseconds=1)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "it must be ISO 8601 text such as 2024-04-01T12:00:00 (UTC unless it names a zone)"
        ) from error


def _parse_amount(raw_amount: Any) -> float:
    if (
        type(raw_amount) in (int, float)
        and math.isfinite(raw_amount)
        and 0 <= raw_amount <= MAX_AMOUNT
    ):
        return raw_amount
    raise ValueError(f"it must be a number from 0 to {MAX_AMOUNT:,.0f}")


def _parse_label(raw_label: object) -> int:
    if raw_label is None or (isinstance(raw_label, int) and raw_label in (0, 1)):
        return int(raw_label or 0)
    raise ValueError("it must be 1 or 0, or left out if the label is not known yet")


Identity = Annotated[
    int, PlainValidator(_parse_identity), WithJsonSchema({"type": ["integer", "string"]})
]
Time = Annotated[
    int, PlainValidator(_parse_time), WithJsonSchema({"type": "string", "format": "date-time"})
]
Amount = Annotated[
    float,
    PlainValidator(_parse_amount),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": MAX_AMOUNT}),
]
Label = Annotated[int, PlainValidator(_parse_label), WithJsonSchema({"enum": [0, 1, None]})]


class Transaction(BaseModel):
    """A transaction to score. Ids are integers or text; `time` is in UTC unless it contains a time
    zone."""

    transaction_id: Identity
    time: Time
    card: Identity
    terminal: Identity
    amount: Amount = Field(description="amount in units of the currency")


class PastTransaction(Transaction):
    """A transaction in the request's history, which is later than the end of the training data."""

    fraud: Label = Field(0, description="1 or 0; left out if the label is not known yet")


class Request(BaseModel):
    """A request for scores."""

    instances: list[Transaction] = Field(min_length=1)
    history: list[PastTransaction] = Field([], max_length=MAX_HISTORY)

    @model_validator(mode="after")
    def _check_unique_ids(self) -> Self:
        for field_name, transactions in (("instances", self.instances), ("history", self.history)):
            index_by_id: dict[int, int] = {}
            for transaction_index, transaction in enumerate(transactions):
                first_index = index_by_id.setdefault(transaction.transaction_id, transaction_index)
                if first_index != transaction_index:
                    raise ValueError(
                        f"{field_name}[{transaction_index}].transaction_id equals"
                        f" {field_name}[{first_index}]'s: each transaction_id must be unique"
                    )
        return self


class FraudPredictor:
    """A released model with its serving state. FraudPredictor implements the protocol Predictor of
    rekindle/workload.py."""

    Request = Request

    def __init__(self, release_folder: Path) -> None:
        self.model = load(release_folder)
        self.batch = BATCH if self.model.width >= MIN_BATCH_WIDTH else 1
        self.state = State.load(release_folder / "state")
        if tuple(self.model.feature_names) != self.state.features:
            raise DataError(
                f"{release_folder}: the model and the serving state have different features."
                " Release the model again."
            )

    def example(self) -> dict[str, Any]:
        """Return a request with one made-up transaction."""
        example_time = format_instant(self.state.train_end)
        return {
            "instances": [
                {
                    "transaction_id": 1,
                    "time": example_time,
                    "card": 7,
                    "terminal": 9,
                    "amount": 250.0,
                }
            ]
        }

    def predict(self, requests: Sequence[Request]) -> list[list[float]]:
        """Return the probability of fraud of each instance. Raises DataError if an instance is
        older than the serving state."""
        row_pairs = zip(
            rows([scored_request.instances for scored_request in requests]),
            rows([scored_request.history for scored_request in requests]),
            strict=True,
        )
        score_iterator = iter(
            self._compute_scores(*self.state.windows(list(row_pairs), self.model.reach + 1))
        )
        return [[next(score_iterator) for _ in request.instances] for request in requests]

    def warn(self, request: Request) -> str:
        """Return a warning if the history is missing and an instance is long after the end of the
        serving state; otherwise ""."""
        state_end = self.state.train_end

        newest_time = max(transaction.time for transaction in request.instances)
        if newest_time - state_end <= MAX_WITHOUT_HISTORY or any(
            past_transaction.time >= state_end for past_transaction in request.history
        ):
            return ""

        days_since_state_end = (newest_time - state_end) / DAY

        return (
            "the history is missing: the model knows the payments until"
            f" {format_instant(state_end)} UTC, {days_since_state_end:.1f} days before the newest"
            " transaction, so its scores are worse. Send the later payments of the cards and"
            " terminals in `history`, or refresh the model."
        )

    def _compute_scores(self, feature_windows: Floats, window_lengths: Ints) -> list[float]:
        """Return the probability of fraud of the last row of each window. The last batch is padded
        with copies of the last window."""
        window_count = len(window_lengths)
        padded_index = np.minimum(
            np.arange(-(-window_count // self.batch) * self.batch), window_count - 1
        )
        window_batches = zip(
            *(
                torch.from_numpy(window_array[padded_index]).split(self.batch)
                for window_array in (feature_windows, window_lengths)
            ),
            strict=True,
        )
        return torch.cat(
            [score_windows(self.model, *window_batch) for window_batch in window_batches]
        )[:window_count].tolist()


def rows(requests: Sequence[Sequence[Transaction]]) -> list[Rows]:
    """Convert the transactions of each request to columns. All requests are converted in one table,
    because numpy is slow for few rows."""
    transactions = list(chain.from_iterable(requests))

    all_rows = Rows.of(
        id=[transaction.transaction_id for transaction in transactions],
        time=[transaction.time for transaction in transactions],
        card=[transaction.card for transaction in transactions],
        terminal=[transaction.terminal for transaction in transactions],
        amount=[transaction.amount for transaction in transactions],
        fraud=[
            transaction.fraud if isinstance(transaction, PastTransaction) else 0
            for transaction in transactions
        ],
    )

    end_positions = list(accumulate(len(request) for request in requests))

    return [
        all_rows[end_position - len(request) : end_position]
        for request, end_position in zip(requests, end_positions, strict=True)
    ]
