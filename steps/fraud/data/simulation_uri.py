"""Parse `simulate://` URIs, without the heavy imports of simulate.py, for the validation of
configs."""

from datetime import date
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import Field, ValidationError

from rekindle.errors import did_you_mean
from rekindle.sections import Section


class World(Section):
    """Size and seed of a simulated world."""

    seed: int = Field(ge=0)
    cards: int = Field(700, ge=1)
    terminals: int = Field(1400, ge=1)
    days: int = Field(91, ge=1)
    start: date = date(2024, 1, 1)
    # number of card takeovers per 1,000 cards and day
    takeovers: float = Field(default=0, ge=0, le=1000)


def parse(uri: str) -> World:
    """Parse simulate://SEED?cards=..&terminals=..&days=..&start=..&takeovers=... Raises
    ValueError."""
    parts = urlsplit(uri)
    values = dict(parse_qsl(parts.query, keep_blank_values=True)) | {"seed": parts.netloc}

    try:
        return World.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])

        keys = set(World.model_fields)
        if name not in keys:
            fault = f"{name!r} is unknown.{did_you_mean(name, keys)}"
        else:
            fault = f"{name}: {first['msg']}."

        raise ValueError(
            f"{fault} It must look like simulate://7 or"
            " simulate://7?cards=700&terminals=1400&days=91&start=2024-01-01"
        ) from error


def unparse(world: World) -> str:
    """Return the URI of a world."""
    return f"simulate://{world.seed}?{urlencode(world.model_dump(mode='json', exclude={'seed'}))}"
