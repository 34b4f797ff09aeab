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
    """The base class of the messages. Types are strict."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class NodeReport(Report):
    """The state of a node before the start: its number of processes, and a free port.

    `last_generation`: key of the last generation that the node took part in, or "";
    `damaged`: keys of checkpoints that it could not restore; `rank`: rank of the node, if its job
    fixes it; `is_server`: its processes do not end by themselves.
    """

    processes: int = Field(ge=1)
    port: int = Field(ge=1, le=65535)
    last_generation: str = ""
    damaged: list[str] = Field(default_factory=list)
    rank: int | None = Field(None, ge=0)
    is_server: bool = False


class Choice(Report):
    """The keys of the checkpoints that all nodes restore, the number of restarts so far, and the
    current time of the object store, since the clocks of the nodes may differ."""

    keys: list[str]
    restarts: int
    time_ns: int = Field(ge=0)


class Leaving(Report):
    """A node must leave within `seconds`."""

    seconds: float


class Restarting(Report):
    """A node restarts its processes for a node that has joined. The other nodes may not see the
    checkpoint that the restart waited for."""


class Failure(Report):
    """The first failure of a node: `time` is a time of the object store in nanoseconds."""

    time: int
    rank: int
    reason: str


class Finished(Report):
    """The processes of a node have ended with exit code 0."""


R = TypeVar("R", bound=Report)


class Exchange:
    """The messages of one generation."""

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
        or a node sends none."""
        keys = [f"{kind}-{id}" for id in self.ids]
        values = self.client.wait_for_values(self.generation, keys, REPORT_TIMEOUT_S)
        return [_parse(model, value) for value in values]

    def wait_for(self, key: str, model: type[R]) -> R:
        """Return the report that rank 0 sends for all. Raises RuntimeError."""
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
