"""The reference workload's sections of a config file: `data:` and `model:`. Light: the pipelines import it."""

import codecs
from datetime import date, datetime, timedelta
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rekindle.errors import did_you_mean
from rekindle.sections import Section
from rekindle.workload import DataConfig
from steps.fraud.data.world import parse

CONTEXT = 63  # transactions of a card before the current one that a model may look at
MAX_HISTORY = 100_000  # rows of history in one request to a served model


class Columns(Section):
    """What the source calls its columns; the defaults are the names of the published data set."""

    id: str = Field(default="TRANSACTION_ID", description="identity of a transaction: a number or text, unique")
    time: str = Field(
        default="TX_DATETIME", description="when it happened: a timestamp, seconds since 1970, or text (UTC)"
    )
    card: str = Field(default="CUSTOMER_ID", description="the card: a number or text")
    terminal: str = Field(default="TERMINAL_ID", description="the terminal or merchant: a number or text")
    amount: str = Field(default="TX_AMOUNT", description="the amount, not negative")
    fraud: str = Field(default="TX_FRAUD", description="the label: 1 fraud, 0 genuine, empty: not known yet")
    scenario: str = Field(default="TX_FRAUD_SCENARIO", description="kind of fraud, for reports only; may be absent")


class Text(Section):
    """How text is written; what is empty is told from the data."""

    encoding: str = Field(
        default="", description="of a CSV file, such as cp1252; empty: UTF-8, or as its first bytes say"
    )
    separator: str = Field(default="", pattern=r"^.?$", description="between the fields of a CSV file: , ; tab |")
    decimal: Literal["", ".", ","] = Field(default="", description="before the cents of an amount")
    time: str = Field(default="", description="s, ms, us or ns since 1970, or a format such as %d/%m/%Y %H:%M:%S (UTC)")

    @field_validator("encoding")
    @classmethod
    def _known(cls, encoding: str) -> str:
        try:
            return encoding and codecs.lookup(encoding).name
        except LookupError:
            raise ValueError("there is no such encoding; cp1252 and latin-1 are common ones") from None


class Data(DataConfig):
    """Where the transactions come from and how they become a dataset."""

    source: str = Field(
        default="simulate://7",
        description="parquet or CSV file, folder or s3:// URI; simulate://SEED makes a world "
        "(simulate://7?cards=700&terminals=1400&days=91&start=2024-01-01)",
    )

    @field_validator("source")
    @classmethod
    def _readable(cls, source: str) -> str:
        scheme = urlsplit(source).scheme
        if scheme == "simulate":
            parse(source)
        elif scheme == "s3" and not (urlsplit(source).netloc and urlsplit(source).path.strip("/")):
            raise ValueError("it must be s3://BUCKET/KEY")
        elif scheme not in ("", "file", "s3"):
            near = did_you_mean(scheme, {"simulate", "s3", "file"})
            raise ValueError(f"it must be a path, an s3:// URI or simulate://SEED.{near}")
        return source

    columns: Columns = Field(default_factory=Columns, description="what the source calls its columns")
    text: Text = Field(default_factory=Text, description="how text is written, where it cannot be told")
    first_day: date | None = Field(default=None, description="leave out what is older (a day, UTC)")
    last_day: date | None = Field(default=None, description="leave out what is newer than this day (UTC)")
    window: str = Field(
        default="",
        pattern=r"^([1-9]\d{0,3}[dw])?$",
        description="such as 90d or 13w: the whole days (UTC) before the time that a run was scheduled for; it sets "
        "first_day, last_day and labels_until anew for each run",
    )
    label_delay_days: int = Field(default=7, ge=1, le=90, description="a fraud becomes known this many days later")
    labels_until: date | None = Field(
        default=None,
        description="every label up to this day (UTC) is known, for archives; else up to label_delay_days before the "
        "source ends",
    )
    test_weeks: int = Field(default=4, ge=1, description="the newest weeks whose labels are known, kept for judging")
    shard_rows: int = Field(default=250_000, ge=1, le=2_000_000, description="transactions in a shard, about")

    @model_validator(mode="after")
    def _moves(self) -> Self:
        fixed = [name for name in ("first_day", "last_day", "labels_until") if getattr(self, name)]
        if self.window and fixed:
            raise ValueError(f"window is {self.window} and {fixed[0]} is set: the window moves it. Remove one of them")
        return self

    @property
    def moves(self) -> bool:
        return bool(self.window)

    def at(self, time: datetime) -> Self:
        """With the days of its window: later rows and labels do not count, so a late run has the same data."""
        if not self.window:
            return self
        last = time.date() - timedelta(days=1)
        first = last - timedelta(days=int(self.window[:-1]) * (7 if self.window[-1] == "w" else 1) - 1)
        known = last - timedelta(days=self.label_delay_days)
        return self.model_copy(update={"first_day": first, "last_day": last, "labels_until": known})


class Model(Section):
    """The transformer's shape."""

    width: int = Field(default=64, ge=8, le=1024, description="size of the state at each transaction")
    layers: int = Field(default=2, ge=1, le=8, description="layers, one on top of the other")
    heads: int = Field(default=4, ge=1, description="attention heads; width must be a multiple of them")
    hidden: int = Field(default=128, ge=8, le=4096, description="size of the feed-forward layers")
    window: int = Field(default=20, ge=1, le=64, description="transactions of the card each layer looks back over")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="share of activations dropped in training")

    @property
    def reach(self) -> int:
        """Transactions before the current one that can influence its score."""
        return self.layers * (self.window - 1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}: it must be a multiple of heads ({self.heads})")
        if self.reach > CONTEXT:
            raise ValueError(
                f"layers * (window - 1) is {self.reach}: it must be at most {CONTEXT}, the transactions of a card "
                f"that are kept for serving. Set window to at most {CONTEXT // self.layers + 1}"
            )
        return self
