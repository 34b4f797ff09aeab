"""The messages between a run's coordinator and its workers: one JSON object a line, over TCP.

Membership changes in numbered generations. The coordinator *opens* a generation when a worker
joins, leaves or is lost; every worker stops at a step boundary (or immediately, if the group is
broken) and *acknowledges* the generation; when all workers have acknowledged it, the member list is
*published* and training resumes. First, the worker and the coordinator prove to each other that
they know the run's secret (handshake.py).

    worker → coordinator
    {"join": {protocol, id, name, address, fingerprint, step, generation, group, peers, harvested,
              capacity}}
        the first message, also after a reconnect; generation: the newest that it knows;
        group: its group (0: it waits for a group); peers: the members of its group;
        harvested: true for an extra worker on idle capacity; capacity: kind of its node, spot or
        on-demand, if known
    {"beat": step, "busy": bool}
        any time: heartbeat and progress; busy: no steps for now
    {"ack": generation, "step": step}
        after an "open" of that generation
    {"fault": generation}
        a collective of that generation failed
    {"put": generation, "key": text, "value": base64}
        to the group's other members: its listening address
    {"leave": reason}
        the last message: the worker exits on purpose
    {"failed": message, "code": n, "name": x, "temporary": b}
        on a separate connection: why this worker ends
    {"done": sha256}
        the model is in the object store
    {"event": what, "name": worker, ...}
        any time, also after leaving; for the ledger

    coordinator → worker
    {"refused": message}
        this worker must not take part
    {"open": generation, "hard": bool}
        stop after this step (hard: now), then ack
    {"members": [[id, address], ...], "generation": n}
        the group; rank = index in the list
    {"put": generation, "key": text, "value": base64}
        from another member
    {"dropped": "silent" or "hung"}
        the last message: join again; hung: end this process
    {"failed": message, "code": exit code}
        the run is aborted
    {"complete": true}
        the run is complete, exit 0

A message of another kind, a message beyond the limits of messages.py, an unknown generation, a
second worker on a connection, or a message from an unregistered worker ends the connection.
"""

import os
from typing import Any

from argolocal.common.environment import MAX_PORT, read_integer
from argolocal.common.json_text import to_json
from argolocal.manifest.training_jobs import JOB_KINDS
from rekindle.kubernetes_names import REKINDLE_COORDINATOR

# version of the messages; workers and coordinator of a run must use the same version
PROTOCOL_VERSION = 2
# port of the coordinator, unless MASTER_PORT is set
DEFAULT_PORT = JOB_KINDS["PyTorchJob"].port[1]
# maximum number of bytes of a message
MAX_LINE_BYTES = 1 << 20
# maximum number of characters of an error message
MAX_TEXT_CHARS = 64 << 10
# maximum number of characters of a value for other members
MAX_VALUE_CHARS = 256 << 10
# largest step: a float represents every integer up to this number exactly
MAX_STEP = 2**53 - 1

Message = dict[str, Any]
Address = tuple[str, int]
# id and address of each member, in the order of the ranks
Members = list[tuple[str, str]]


def encode_message(message: Message) -> bytes:
    return to_json(message).encode() + b"\n"


def read_coordinator_port() -> int:
    """Return the coordinator's port from the environment. Raises ConfigError."""
    if REKINDLE_COORDINATOR in os.environ:
        # in such a job, MASTER_PORT belongs to the program, not to the coordinator
        return DEFAULT_PORT
    return read_integer("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT)


def read_coordinator_address() -> Address | None:
    """Return the coordinator's address from the environment; None if MASTER_ADDR is not set. Raises
    ConfigError."""
    coordinator_host = os.environ.get(REKINDLE_COORDINATOR) or os.environ.get("MASTER_ADDR")
    if coordinator_host:
        return (coordinator_host, read_coordinator_port())
    return None
