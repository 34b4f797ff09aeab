"""What the coordinator takes from a worker: the messages of protocol.py, each of its form and within its bounds."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from rekindle.training.membership.protocol import MAX_TEXT, MAX_VALUE, Message

Number = Annotated[int, Field(ge=0, lt=2**53)]
Step = Annotated[int, Field(ge=-1, lt=2**53)]
Id = Annotated[str, StringConstraints(pattern=r"^[\w-]{1,64}\z")]
Name = Annotated[str, StringConstraints(max_length=512, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\z")]  # it is logged
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
EXACT = ConfigDict(strict=True, extra="forbid")


@with_config(EXACT)
class Hello(TypedDict):
    protocol: int
    id: Id
    name: Name
    address: Name
    fingerprint: Annotated[dict[Name, int | Name], Field(max_length=32)]
    step: Step
    generation: Number
    group: Number
    peers: Annotated[list[Id], Field(max_length=4096)]


@with_config(EXACT)
class Join(TypedDict):
    join: Hello


@with_config(EXACT)
class Heartbeat(TypedDict):
    beat: Step
    busy: bool


@with_config(EXACT)
class Ack(TypedDict):
    ack: Number
    step: Step


@with_config(EXACT)
class Fault(TypedDict):
    fault: Number


@with_config(EXACT)
class Put(TypedDict):
    put: Number
    key: Name
    value: Annotated[str, StringConstraints(max_length=MAX_VALUE, pattern=r"^[A-Za-z0-9+/]*={0,2}\z")]


@with_config(EXACT)
class Leave(TypedDict):
    leave: Name


@with_config(EXACT)
class Failed(TypedDict):
    failed: Text
    code: Annotated[int, Field(ge=1, le=255)]
    name: Name
    temporary: bool


@with_config(EXACT)
class Done(TypedDict):
    done: Name


@with_config(ConfigDict(strict=True, extra="allow"))
class Event(TypedDict):
    event: Name
    name: Name


KINDS: dict[str, Any] = {
    kind: TypeAdapter[Any](form)
    for kind, form in {
        "beat": Heartbeat, "ack": Ack, "join": Join, "fault": Fault, "failed": Failed, "event": Event,
        "put": Put, "leave": Leave, "done": Done,
    }.items()
}  # fmt: skip


def parse(line: bytes) -> tuple[str, Message]:
    """The kind of a message, which is its key in KINDS, and the message. Raises ValueError."""
    message = from_json(line, allow_inf_nan=False)
    kind = next((kind for kind in KINDS if kind in message), "") if isinstance(message, dict) else ""
    if not kind:
        raise ValueError(f"no message that is known: {line[:100]!r}")
    try:
        return kind, KINDS[kind].validate_python(message)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_input=False)
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]) from None
