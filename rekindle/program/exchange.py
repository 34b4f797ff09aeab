"""The messages between the agents of a group, which the coordinator forwards.

node-<id>       NodeReport     before the start
choice          Choice         the agent of rank 0 chooses the checkpoints
leaving-<id>    Leaving        this node must leave: all processes get SIGTERM
restarting-<id> Restarting     a node joined, and this node has saved: all processes get SIGTERM
failed-<id>     Failure        a process of this node failed by itself
finished-<id>   Finished       all processes of this node ended with exit code 0
"""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rekindle.documents import validate
from rekindle.training.membership.client import Client
from rekindle.training.membership.protocol import Members

REPORT_TIMEOUT_S = 120.0


class Report(BaseModel):
    """The base class of the messages. Field types are validated strictly."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class NodeReport(Report):
    """The state of a node before the start: its number of processes, and a free port.

    `last_generation`: key of the last generation that the node took part in, or "";
    `damaged`: keys of checkpoints that it could not restore; `rank`: rank of the node if its job
    prescribes one; `is_server`: True if the node's processes do not end by themselves.
    """

    processes: int = Field(ge=1)
    port: int = Field(ge=1, le=65535)
    last_generation: str = ""
    damaged: list[str] = Field(default_factory=list)
    rank: int | None = Field(None, ge=0)
    is_server: bool = False


class Choice(Report):
    """The decisions of rank 0 for all nodes: keys of the checkpoints to restore, number of restarts
    so far, and current time of the object store, since the nodes' clocks may differ."""

    keys: list[str]
    restarts: int
    time_ns: int = Field(ge=0)


class Leaving(Report):
    """The message that a node must leave within `seconds`."""

    seconds: float


class Restarting(Report):
    """The message that a node restarts its processes because a node has joined. It is needed since
    other nodes may not see the checkpoint that triggers the restart."""


class Failure(Report):
    """The first failure of a node: `time` is a time of the object store in nanoseconds."""

    time: int
    rank: int
    reason: str


class Finished(Report):
    """The message that all processes of a node have ended with exit code 0."""


R = TypeVar("R", bound=Report)


class Exchange:
    """Sends and receives the messages of one generation."""

    def __init__(self, client: Client, generation: int, members: Members) -> None:
        self.client = client
        self.generation = generation
        self.ids = [id for id, _ in members]

    def send(self, kind: str, report: Report, *, shared: bool = False) -> None:
        key = kind if shared else f"{kind}-{self.client.id}"
        text = report.model_dump_json()
        self.client.send_value(self.generation, key, text.encode())

    def wait_for_all(self, kind: str, model: type[R]) -> list[R]:
        """Return the reports of all nodes, by rank. Raises RuntimeError if the generation is over,
        or a report does not arrive in time."""
        keys = [f"{kind}-{id}" for id in self.ids]
        values = self.client.wait_for_values(self.generation, keys, REPORT_TIMEOUT_S)
        return [_parse(model, value) for value in values]

    def wait_for(self, key: str, model: type[R]) -> R:
        """Return the report that rank 0 sends to all nodes. Raises RuntimeError."""
        (value,) = self.client.wait_for_values(self.generation, [key], REPORT_TIMEOUT_S)
        return _parse(model, value)

    def received(self, kind: str, model: type[R]) -> list[R]:
        """Return the reports that have arrived so far."""
        values = [self.client.find_value(self.generation, f"{kind}-{id}") for id in self.ids]
        return [_parse(model, value) for value in values if value is not None]


def _parse(model: type[R], value: bytes) -> R:
    try:
        return validate(model, value)
    except ValueError as error:
        raise RuntimeError(f"a message between the agents is malformed: {error}") from None
