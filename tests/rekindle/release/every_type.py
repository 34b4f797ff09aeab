"""A workload whose instances have a field of each type, and whose predictions are the instances
that it got."""

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field, WithJsonSchema

from tests.rekindle.release.lines import (
    Data,
    Model,
    dataset,
    examples,
    loss,
    metrics,
    model,
    prepare,
)

__all__ = ["Data", "Model", "dataset", "examples", "loss", "metrics", "model", "prepare"]


class Colour(Enum):
    red = "red"
    blue = "blue"


class Level(IntEnum):
    low = 1
    high = 2


class Place(BaseModel):
    zone: int | None
    name: str = "somewhere"


class Instance(BaseModel):
    id: int
    number: float
    flag: bool
    text: str
    moment: datetime
    day: date
    at: time
    wait: timedelta
    kind: Literal["a", "b"]
    step: Literal[1, 2]
    colour: Colour
    level: Level
    key: UUID
    price: Decimal
    counts: list[int]
    rates: list[float | None]
    pair: tuple[int, str]
    shares: dict[str, float]
    place: Place
    places: list[Place]
    mixed: int | str
    anything: Any
    described: Annotated[float | str, WithJsonSchema({"type": ["string", "number"]})]

    maybe_id: int | None
    maybe_number: float | None
    maybe_flag: bool | None
    maybe_text: str | None
    maybe_moment: datetime | None
    maybe_day: date | None
    maybe_kind: Literal["a", "b"] | None
    maybe_step: Literal[1, 2, None]
    maybe_level: Level | None
    maybe_price: Decimal | None
    maybe_counts: list[int] | None
    maybe_place: Place | None
    maybe_mixed: int | bool | None

    none_id: int | None = None
    none_number: float | None = None
    none_flag: bool | None = None
    none_text: str | None = None
    none_day: date | None = None
    none_counts: list[int] | None = None

    five: int = 5
    half: float = 0.5
    yes: bool = True
    word: str = "word"
    three: int | None = Field(3, ge=1)


def predict(model: Any, instances: list[Instance], facts: dict[str, Any]) -> list[Any]:
    """Predict: return the fields of each instance."""
    return [instance.model_dump(mode="json") for instance in instances]
