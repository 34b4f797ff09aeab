"""Poll controllers in a test."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from argolocal.controllers.controller import Controller
from tests.waiting import until


def wait(
    controller: Controller,
    holds: Callable[[dict[str, Any]], Any],
    name: str = "job",
    seconds: float = 60,
    other_controllers: Iterable[Controller] = (),
) -> dict[str, Any]:
    """Poll all controllers until `holds` returns a true value for the status of the object, and
    return this status."""
    status: dict[str, Any] = {}

    def poll() -> bool:
        for polled in (controller, *other_controllers):
            polled.poll()
        status.clear()
        status.update((controller.get(name) or {}).get("status") or {})
        return bool(holds(status))

    until("the status to hold", poll, seconds, evidence=lambda: json.dumps(status, indent=1))
    return status
