"""Transactions in memory, as one numpy array per column; the same code handles a data set and a
request.

On disk (`transactions.parquet`, `rejects.parquet`) the columns are `id`, `time` (timestamp, UTC),
`card`, `terminal`, `amount`, `fraud` (null: not known yet) and `scenario`. `identity` converts text
ids to numbers without a lookup table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars as pl

DAY = 86_400_000_000  # µs
# value of `fraud` for a row whose true label is not known yet
UNKNOWN = 2
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Transactions as columns of equal length.

    Amounts are in integer cents, so that their sums are exact, and features do not depend on the
    order of rows.
    """

    id: Ints
    # µs since the epoch, UTC
    time: Ints
    card: Ints
    terminal: Ints
    # amount in cents, rounded
    cents: Ints
    # label: 1 for fraud, 0 for genuine, or UNKNOWN
    fraud: NDArray[np.uint8]
    # kind of fraud; 0: genuine or unknown
    scenario: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, row_selection: object) -> "Rows":
        return Rows(
            **{column_name: getattr(self, column_name)[row_selection] for column_name in NAMES}
        )

    @classmethod
    def concat(cls, row_pieces: Sequence["Rows"]) -> "Rows":
        """Concatenate `row_pieces` (at least one)."""
        return cls(
            **{
                column_name: np.concatenate(
                    [getattr(piece_rows, column_name) for piece_rows in row_pieces]
                )
                for column_name in NAMES
            }
        )

    @classmethod
    def of(
        cls,
        id: Any,
        time: Any,
        card: Any,
        terminal: Any,
        amount: Any,
        fraud: Any = 0,
        scenario: Any = 0,
    ) -> "Rows":
        """Create Rows from sequences; `amount` is in currency units, and `time` in µs since the
        epoch. A scalar argument applies to all rows."""
        row_count = len(time)
        return cls(
            *(
                np.asarray(integer_column, np.int64)
                for integer_column in (id, time, card, terminal)
            ),
            cents=np.rint(np.asarray(amount, np.float64) * 100).astype(np.int64),
            fraud=np.broadcast_to(np.asarray(fraud, np.uint8), row_count),
            scenario=np.broadcast_to(np.asarray(scenario, np.uint8), row_count),
        )

    @classmethod
    def from_frame(cls, checked_table: "pl.DataFrame") -> "Rows":
        """Create rows from a checked frame with the columns of `transactions.parquet`."""
        checked_table = checked_table.with_columns(checked_table["fraud"].fill_null(UNKNOWN))
        column_arrays = {
            column_name: checked_table[column_name].to_numpy()
            for column_name in ("id", "card", "terminal", "amount", "fraud", "scenario")
        }
        return cls.of(time=checked_table["time"].dt.epoch("us").to_numpy(), **column_arrays)

    def to_frame(self) -> "pl.DataFrame":
        """Return the rows as a frame with the columns of `transactions.parquet`."""
        import polars as pl

        column_arrays = {column_name: getattr(self, column_name) for column_name in NAMES} | {
            "amount": self.cents / 100
        }
        column_names = ["id", "time", "card", "terminal", "amount", "fraud", "scenario"]
        table = pl.DataFrame(
            {column_name: column_arrays[column_name] for column_name in column_names}
        )
        label_expression = pl.when(pl.col("fraud") != UNKNOWN).then("fraud")
        return table.with_columns(pl.col("time").cast(pl.Datetime("us")), fraud=label_expression)


NAMES = tuple(field.name for field in fields(Rows))


def first_rows_of_groups(group_ids: Ints) -> Ints:
    """For each row, return the index of the first row of its group; the rows of a group must be
    contiguous."""
    is_first = np.append(True, group_ids[1:] != group_ids[:-1])
    return np.maximum.accumulate(np.where(is_first, np.arange(len(group_ids)), 0))


def format_instant(microseconds: Any) -> str:
    """Format `microseconds` (µs since the epoch) as ISO 8601 text in seconds, without a time
    zone."""
    return str(np.datetime64(int(microseconds), "us").astype("datetime64[s]"))


def format_utc(microseconds: object) -> str:
    """Format `microseconds` (µs since the epoch) as ISO 8601 text with the time zone."""
    return f"{format_instant(microseconds)}+00:00"


def format_day(microseconds: object) -> str:
    """Return the day (UTC) of `microseconds` (µs since the epoch) as text."""
    return format_instant(microseconds)[:10]


def identity(id_text: str) -> int:
    """Convert a text id to an integer: its numeric value if it is an integer, otherwise 63 bits of
    its hash."""
    try:
        numeric_id = int(id_text)
        if abs(numeric_id) < 1 << 63:
            return numeric_id
    except ValueError:
        numeric_id = 0
    return int.from_bytes(blake2b(id_text.encode(), digest_size=8).digest(), "big") >> 1
