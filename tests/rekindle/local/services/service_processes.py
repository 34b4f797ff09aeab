"""Embedded services as processes."""

import os
import signal

from rekindle.local.services.services import ServiceRecord, Services
from tests.waiting import until

PLAIN_ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def record_services(services: Services, name: str) -> ServiceRecord:
    record = services.find(name)
    assert record
    return record


def kill_service(services: Services, name: str) -> ServiceRecord:
    """Kill the process of a service, and return the record of the service."""
    killed_record = record_services(services, name)
    os.kill(killed_record.pid, signal.SIGKILL)
    until("the service to die", lambda: not killed_record.alive)
    return killed_record
