"""A controller that a test polls itself."""

import json
from collections.abc import Callable
from typing import Any

from argolocal.controllers.base import Controller
from tests.waiting import until


def wait(
    jobs: Controller, holds: Callable[[dict[str, Any]], Any], name: str = "job", seconds: float = 60
) -> dict[str, Any]:
    """Poll until the job's status holds, and return that status."""
    status: dict[str, Any] = {}

    def look() -> bool:
        jobs.poll()
        status.clear()
        status.update((jobs.get(name) or {}).get("status") or {})
        return bool(holds(status))

    until("the status to hold", look, seconds, evidence=lambda: json.dumps(status, indent=1))
    return status
