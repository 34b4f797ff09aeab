"""The messages between the agents (first processes of the pods) of a group, which the coordinator
forwards.

node-<id>       NodeReport        before the start
choice          RestoreChoice     the agent of rank 0 chooses the checkpoints
leaving-<id>    LeavingReport     this node must leave: all processes get SIGTERM
restarting-<id> RestartingReport  a node joined, and this node has saved: all processes get SIGTERM
failed-<id>     FailureReport     a process of this node failed by itself
finished-<id>   FinishedReport    all processes of this node ended with exit code 0
"""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rekindle.documents import parse_and_validate
from rekindle.training.membership.client import CoordinatorClient
from rekindle.training.membership.protocol import Members

REPORT_TIMEOUT_S = 120.0


class ReportMessage(BaseModel):
    """The base class of the messages between agents. Field types are validated strictly."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class NodeReport(ReportMessage):
    """The state of a node before the start: its number of processes, and a free port.

    `last_generation`: key of the last generation that the node took part in, or ""; `damaged`: keys
    of checkpoints that the node could not restore; `rank`: rank of the node if its job prescribes
    one; `is_server` is True if the node's processes do not end by themselves.
    """

    processes: int = Field(ge=1)
    port: int = Field(ge=1, le=65535)
    last_generation: str = ""
    damaged: list[str] = Field(default_factory=list)
    rank: int | None = Field(None, ge=0)
    is_server: bool = False


class RestoreChoice(ReportMessage):
    """The decisions of rank 0 for all nodes: keys of the checkpoints to restore, number of restarts
    so far, and current time of the object store, since the nodes' clocks may differ."""

    keys: list[str]
    restarts: int
    time_ns: int = Field(ge=0)


class LeavingReport(ReportMessage):
    """The message that a node must leave within `seconds`."""

    seconds: float


class RestartingReport(ReportMessage):
    """The message that a node restarts its processes because another node has joined. The other
    nodes need this message, because they may not see the checkpoint that triggers the restart."""


class FailureReport(ReportMessage):
    """The first failure of a process on a node. `time`: time of the failure in nanoseconds, by the
    clock of the object store; `rank`: rank of the process that failed."""

    time: int
    rank: int
    reason: str


class FinishedReport(ReportMessage):
    """The message that all processes of a node have ended with exit code 0."""


ReportT = TypeVar("ReportT", bound=ReportMessage)


class ReportExchange:
    """Sends and receives the messages of one generation."""

    def __init__(
        self, group_client: CoordinatorClient, generation_number: int, members: Members
    ) -> None:
        self.client = group_client
        self.generation = generation_number
        self.ids = [member_id for member_id, _ in members]

    def send(self, report_kind: str, report: ReportMessage, *, is_shared: bool = False) -> None:
        report_key = report_kind if is_shared else f"{report_kind}-{self.client.id}"
        report_json = report.model_dump_json()
        self.client.send_value(self.generation, report_key, report_json.encode())

    def wait_for_all(self, report_kind: str, report_class: type[ReportT]) -> list[ReportT]:
        """Wait for a report of each node; return the reports by rank. Raises RuntimeError if the
        generation is over, or a report does not arrive in time."""
        report_keys = [f"{report_kind}-{member_id}" for member_id in self.ids]
        report_bytes = self.client.wait_for_values(self.generation, report_keys, REPORT_TIMEOUT_S)
        return [_parse_report(report_class, report_value) for report_value in report_bytes]

    def wait_for(self, report_key: str, report_class: type[ReportT]) -> ReportT:
        """Wait for the report that rank 0 sends to all nodes, and return the report. Raises
        RuntimeError."""
        (report_value,) = self.client.wait_for_values(
            self.generation, [report_key], REPORT_TIMEOUT_S
        )
        return _parse_report(report_class, report_value)

    def received(self, report_kind: str, report_class: type[ReportT]) -> list[ReportT]:
        """Return the reports of other agents that have arrived so far."""
        report_values = [
            self.client.find_value(self.generation, f"{report_kind}-{member_id}")
            for member_id in self.ids
        ]
        return [
            _parse_report(report_class, report_value)
            for report_value in report_values
            if report_value is not None
        ]


def _parse_report(report_class: type[ReportT], report_bytes: bytes) -> ReportT:
    try:
        return parse_and_validate(report_class, report_bytes)
    except ValueError as error:
        raise RuntimeError(f"a message between the agents is malformed: {error}") from None
