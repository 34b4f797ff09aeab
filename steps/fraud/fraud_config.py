"""The config sections `data` and `model` of the reference workload. Rendering a pipeline imports
this module, so the import must be fast."""

import codecs
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rekindle.errors import suggest_similar
from rekindle.names import parse_s3_address
from rekindle.sections import Section
from rekindle.workload import DataConfig
from steps.fraud.data.simulation_uri import parse, unparse

# maximum number of earlier transactions of the card that a model may use
CONTEXT = 63
# minimum number of cards of a reduced simulation; with fewer, a week may contain no fraud
MIN_CARDS = 200
# maximum number of history rows in one request to a server
MAX_HISTORY = 100_000


class Columns(Section):
    """Column names of the source; the defaults are the names in the published data set."""

    id: str = Field(
        default="TRANSACTION_ID", description="unique id of the transaction: a number or text"
    )
    time: str = Field(
        default="TX_DATETIME",
        description="time of the transaction: a timestamp, seconds since 1970, or text (UTC)",
    )
    card: str = Field(default="CUSTOMER_ID", description="id of the card: a number or text")
    terminal: str = Field(
        default="TERMINAL_ID", description="id of the terminal or merchant: a number or text"
    )
    amount: str = Field(default="TX_AMOUNT", description="amount of the transaction, not negative")
    fraud: str = Field(
        default="TX_FRAUD", description="label: 1 fraud, 0 genuine, empty if not known yet"
    )
    scenario: str = Field(
        default="TX_FRAUD_SCENARIO", description="kind of fraud, for reports only; optional"
    )

    def describe(self, column_name: str) -> str:
        """Describe a column for messages, by its name in the source and the setting that contains
        this name."""
        return f'column "{getattr(self, column_name)}" (data.columns.{column_name})'


class Text(Section):
    """Format of text columns in the source. If a setting is empty, the format is detected from the
    data."""

    encoding: str = Field(
        default="",
        description=(
            "encoding of CSV files, such as cp1252; empty: UTF-8, or UTF-16 by its byte order mark"
        ),
    )
    separator: str = Field(
        default="",
        pattern=r"^.?$",
        description="field separator of CSV files, such as ; (empty: detected among , ; tab |)",
    )
    decimal: Literal["", ".", ","] = Field(default="", description="decimal separator of amounts")
    time: str = Field(
        default="",
        description=(
            "format of times, such as %d/%m/%Y %H:%M:%S (UTC), or unit of numbers since 1970 (s,"
            " ms, us, ns)"
        ),
    )

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, encoding: str) -> str:
        try:
            return encoding and codecs.lookup(encoding).name
        except LookupError:
            raise ValueError(
                "this encoding does not exist; common encodings are cp1252 and latin-1"
            ) from None


class Data(DataConfig):
    """Source of the transactions, and settings of the dataset."""

    source: str = Field(
        default="simulate://7",
        description=(
            "parquet or CSV file, folder or s3:// URI; simulate://SEED generates data"
            " (simulate://7?cards=700&terminals=1400&days=91&start=2024-01-01&takeovers=2, the"
            " last: account takeovers per 1,000 cards and day, default 0)"
        ),
    )

    @field_validator("source")
    @classmethod
    def _check_source(cls, source_uri: str) -> str:
        uri_scheme = urlsplit(source_uri).scheme
        s3_address = parse_s3_address(source_uri)
        if uri_scheme == "simulate":
            parse(source_uri)
        elif s3_address and not (s3_address.bucket and s3_address.key.strip("/")):
            raise ValueError("it must be s3://BUCKET/KEY")
        elif uri_scheme not in ("", "file", "s3"):
            suggestion_text = suggest_similar(uri_scheme, {"simulate", "s3", "file"})
            raise ValueError(
                f"it must be a path, an s3:// URI or simulate://SEED.{suggestion_text}"
            )
        return source_uri

    columns: Columns = Field(default_factory=Columns, description="column names of the source")
    text: Text = Field(
        default_factory=Text, description="format of text columns, if it cannot be detected"
    )
    first_day: date | None = Field(
        default=None, description="leave out transactions before this day (UTC)"
    )
    last_day: date | None = Field(
        default=None, description="leave out transactions after this day (UTC)"
    )
    window: str = Field(
        default="",
        pattern=r"^([1-9]\d{0,3}[dw])?$",
        description=(
            "length of a moving window, such as 90d or 13w: whole days (UTC) before the scheduled"
            " time of a run; sets first_day, last_day and labels_until for each run"
        ),
    )
    label_delay_days: int = Field(
        default=7, ge=1, le=90, description="days until the label of a transaction is known"
    )
    labels_until: date | None = Field(
        default=None,
        description=(
            "last day (UTC) whose labels are all known, for archives; default: label_delay_days"
            " before the source ends"
        ),
    )
    test_weeks: int = Field(
        default=4, ge=1, description="number of newest weeks with known labels to evaluate on"
    )
    shard_rows: int = Field(
        default=250_000,
        ge=1,
        le=2_000_000,
        description="approximate number of transactions per shard",
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        fixed_date_settings = [
            setting_name
            for setting_name in ("first_day", "last_day", "labels_until")
            if getattr(self, setting_name)
        ]
        if self.window and fixed_date_settings:
            raise ValueError(
                f"window is {self.window} and {fixed_date_settings[0]} is set: the window sets it."
                f" Remove window or {fixed_date_settings[0]}"
            )
        return self

    @property
    def moves(self) -> bool:
        return bool(self.window)

    def at(self, time: datetime) -> Self:
        """Return the section `data` with the window that ends at the scheduled `time`, even if the
        run starts later."""
        if not self.window:
            return self
        last_day_of_window = time.date() - timedelta(days=1)
        first_day_of_window = last_day_of_window - timedelta(
            days=int(self.window[:-1]) * (7 if self.window[-1] == "w" else 1) - 1
        )
        labels_until = last_day_of_window - timedelta(days=self.label_delay_days)
        return self.model_copy(
            update={
                "first_day": first_day_of_window,
                "last_day": last_day_of_window,
                "labels_until": labels_until,
            }
        )

    def first_rows(self, rows: int, folder: Path) -> Self | None:
        """Return the section for a smaller simulated world. Return None for data that is not
        simulated, because its first rows would not reach the test weeks."""
        if not self.source.startswith("simulate://"):
            return None
        simulated_world = parse(self.source)
        card_count = min(simulated_world.cards, max(MIN_CARDS, rows // simulated_world.days))
        world_size = {
            "cards": card_count,
            "terminals": max(1, simulated_world.terminals * card_count // simulated_world.cards),
        }
        return self.model_copy(
            update={"source": unparse(simulated_world.model_copy(update=world_size))}
        )


class Model(Section):
    """Shape of the transformer."""

    width: int = Field(default=64, ge=8, le=1024, description="size of the hidden state")
    layers: int = Field(default=2, ge=1, le=8, description="number of layers")
    heads: int = Field(default=4, ge=1, description="number of attention heads; must divide width")
    hidden: int = Field(default=128, ge=8, le=4096, description="size of the feed-forward layers")
    window: int = Field(
        default=20,
        ge=1,
        le=64,
        description="number of transactions of the card that each layer attends to",
    )
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="share of activations that are dropped in training"
    )

    @property
    def reach(self) -> int:
        """Number of earlier transactions of the card that can influence a score."""
        return self.layers * (self.window - 1)

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}: it must be a multiple of heads ({self.heads})"
            )
        if self.reach > CONTEXT:
            raise ValueError(
                f"layers * (window - 1) is {self.reach}: it must be at most {CONTEXT}, the number"
                " of transactions of a card that are kept for serving. Set window to at most"
                f" {CONTEXT // self.layers + 1}"
            )
        return self
