"""Parse `simulate://` URIs, without the heavy imports of simulate.py, for the validation of
configs."""

from datetime import date
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import Field, ValidationError

from rekindle.errors import suggest_similar
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
    uri_parts = urlsplit(uri)
    uri_values = dict(parse_qsl(uri_parts.query, keep_blank_values=True)) | {
        "seed": uri_parts.netloc
    }

    try:
        return World.model_validate(uri_values)
    except ValidationError as error:
        first_error = error.errors()[0]
        field_name = str(first_error["loc"][0])

        field_names = set(World.model_fields)
        if field_name not in field_names:
            fault_sentence = f"{field_name!r} is unknown.{suggest_similar(field_name, field_names)}"
        else:
            fault_sentence = f"{field_name}: {first_error['msg']}."

        raise ValueError(
            f"{fault_sentence} It must look like simulate://7 or"
            " simulate://7?cards=700&terminals=1400&days=91&start=2024-01-01"
        ) from error


def unparse(world: World) -> str:
    """Return the URI of a world."""
    return f"simulate://{world.seed}?{urlencode(world.model_dump(mode='json', exclude={'seed'}))}"
