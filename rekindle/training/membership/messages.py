"""Parses and validates the messages of workers (see protocol.py): keys, types and size limits."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

# pydantic needs this TypedDict before Python 3.12
from typing_extensions import TypedDict

from rekindle.errors import format_rule
from rekindle.training.membership.protocol import MAX_STEP, MAX_TEXT_CHARS, MAX_VALUE_CHARS, Message

Number = Annotated[int, Field(ge=0, lt=2**53)]
Step = Annotated[int, Field(ge=-1, le=MAX_STEP)]
Id = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}\z")]
# names must not contain control characters, since names are logged
Name = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\z")]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
Value = Annotated[
    str, StringConstraints(max_length=MAX_VALUE_CHARS, pattern=r"^[A-Za-z0-9+/]*={0,2}\z")
]
# TypedDict is typed as Any here, because type checkers accept only literals as its arguments
typed_dict: Any = TypedDict


def make_message_type(
    extra_fields: Literal["forbid", "allow"] = "forbid", **field_types: object
) -> Any:
    """Return the type of a JSON object with the given fields; `extra_fields`: "allow" if the object
    may also have other fields."""
    return with_config(ConfigDict(strict=True, extra=extra_fields))(typed_dict("Form", field_types))


HELLO_TYPE = make_message_type(
    protocol=int,
    id=Id,
    name=Name,
    address=Name,
    fingerprint=Annotated[dict[Name, int | Name], Field(max_length=32)],
    step=Step,
    generation=Number,
    group=Number,
    peers=Annotated[list[Id], Field(max_length=4096)],
    harvested=NotRequired[bool],
    capacity=NotRequired[Name],
)
MESSAGE_TYPES = {
    "beat": make_message_type(beat=Step, busy=bool),
    "ack": make_message_type(ack=Number, step=Step),
    "join": make_message_type(join=HELLO_TYPE),
    "fault": make_message_type(fault=Number),
    "failed": make_message_type(
        failed=Text, code=Annotated[int, Field(ge=1, le=255)], name=Name, temporary=bool
    ),
    "event": make_message_type("allow", event=Name, name=Name),
    "put": make_message_type(put=Number, key=Name, value=Value),
    "leave": make_message_type(leave=Name),
    "done": make_message_type(done=Name),
}
MESSAGE_VALIDATORS = {kind: TypeAdapter[Any](form) for kind, form in MESSAGE_TYPES.items()}


def parse_message(message_line: bytes) -> tuple[str, Message]:
    """Return the kind of a message (its key in MESSAGE_VALIDATORS) and the message. Raises
    ValueError."""
    message = from_json(message_line, allow_inf_nan=False)
    if isinstance(message, dict):
        message_kind = next(
            (message_kind for message_kind in MESSAGE_VALIDATORS if message_kind in message), ""
        )
    else:
        message_kind = ""

    if not message_kind:
        raise ValueError(f"unknown message: {message_line[:100]!r}")

    try:
        return message_kind, MESSAGE_VALIDATORS[message_kind].validate_python(message)
    except ValidationError as error:
        (first_error, *_) = error.errors(include_url=False, include_input=False)
        raise ValueError(
            f"{'.'.join(map(str, first_error['loc']))}: {format_rule(first_error['msg'])}"[:300]
        ) from None
