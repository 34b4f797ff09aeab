"""The position of a pod in a job of another framework: its rank, and whether its program ends by
itself."""

import os
import re
from dataclasses import dataclass

from argolocal.common.environment import read_integer
from rekindle.kubernetes_names import (
    POD_NAME,
    REKINDLE_COORDINATOR,
    REKINDLE_ROLE_RANK,
    REKINDLE_SERVER,
)

MAX_RANK = 1_000_000
POD_INDEX_PATTERN = re.compile(r"-(\d+)$")


@dataclass(frozen=True)
class PodPosition:
    """The rank of a pod in a job; the pod with rank 0 runs the coordinator and stores the result.
    `is_server` is True if the program of this pod does not end by itself."""

    rank: int
    is_server: bool = False


def read_pod_position() -> PodPosition | None:
    """Return the position of this pod; None if the job has a separate pod for the coordinator.
    Raises ConfigError."""
    if REKINDLE_COORDINATOR not in os.environ:
        return None

    # the Launcher of an MPIJob is the only pod whose name lacks an index
    index_match = POD_INDEX_PATTERN.search(os.environ.get(POD_NAME, ""))
    first_rank = read_integer(REKINDLE_ROLE_RANK, 0, 0, MAX_RANK)
    rank = first_rank + (int(index_match[1]) if index_match else 0)
    return PodPosition(rank, bool(os.environ.get(REKINDLE_SERVER)))
