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
UNKNOWN = 2  # label of a row whose true label is not known yet
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Transactions as columns of equal length.

    Amounts are in integer cents: their sums are exact, so features do not depend on the order of
    rows.
    """

    id: Ints
    time: Ints  # µs since the epoch, UTC
    card: Ints
    terminal: Ints
    cents: Ints  # amount in cents, rounded
    fraud: NDArray[np.uint8]  # label: 1 for fraud, 0 for genuine, or UNKNOWN
    scenario: NDArray[np.uint8]  # kind of fraud; 0: genuine or unknown

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, index: object) -> "Rows":
        return Rows(**{name: getattr(self, name)[index] for name in NAMES})

    @classmethod
    def concat(cls, pieces: Sequence["Rows"]) -> "Rows":
        """Concatenate `pieces` (at least one)."""
        return cls(
            **{name: np.concatenate([getattr(rows, name) for rows in pieces]) for name in NAMES}
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
        """Create rows from sequences; `amount` is in currency units, and `time` in µs since the
        epoch. A scalar argument applies to all rows."""
        n = len(time)
        return cls(
            *(np.asarray(column, np.int64) for column in (id, time, card, terminal)),
            cents=np.rint(np.asarray(amount, np.float64) * 100).astype(np.int64),
            fraud=np.broadcast_to(np.asarray(fraud, np.uint8), n),
            scenario=np.broadcast_to(np.asarray(scenario, np.uint8), n),
        )

    @classmethod
    def from_frame(cls, frame: "pl.DataFrame") -> "Rows":
        """Create rows from a checked frame with the columns of `transactions.parquet`."""
        frame = frame.with_columns(frame["fraud"].fill_null(UNKNOWN))
        columns = {
            name: frame[name].to_numpy()
            for name in ("id", "card", "terminal", "amount", "fraud", "scenario")
        }
        return cls.of(time=frame["time"].dt.epoch("us").to_numpy(), **columns)

    def to_frame(self) -> "pl.DataFrame":
        """Return the rows as a frame with the columns of `transactions.parquet`."""
        import polars as pl

        columns = {name: getattr(self, name) for name in NAMES} | {"amount": self.cents / 100}
        column_names = ["id", "time", "card", "terminal", "amount", "fraud", "scenario"]
        frame = pl.DataFrame({name: columns[name] for name in column_names})
        label = pl.when(pl.col("fraud") != UNKNOWN).then("fraud")
        return frame.with_columns(pl.col("time").cast(pl.Datetime("us")), fraud=label)


NAMES = tuple(field.name for field in fields(Rows))


def first_rows_of_groups(groups: Ints) -> Ints:
    """For each row, return the index of the first row of its group; the rows of a group must be
    contiguous."""
    is_first = np.append(True, groups[1:] != groups[:-1])
    return np.maximum.accumulate(np.where(is_first, np.arange(len(groups)), 0))


def format_instant(time: Any) -> str:
    """Format `time` (µs since the epoch) as ISO 8601 text in seconds, without a time zone."""
    return str(np.datetime64(int(time), "us").astype("datetime64[s]"))


def format_utc(time: object) -> str:
    """Format `time` (µs since the epoch) as ISO 8601 text with the time zone."""
    return f"{format_instant(time)}+00:00"


def format_day(time: object) -> str:
    """Return the day (UTC) of `time` (µs since the epoch) as text."""
    return format_instant(time)[:10]


def identity(text: str) -> int:
    """Convert a text id to an integer: its numeric value if it is an integer, otherwise 63 bits of
    its hash."""
    try:
        value = int(text)
        if abs(value) < 1 << 63:
            return value
    except ValueError:
        value = 0
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
