"""Poll the cloud's spot-interruption notice, which precedes or replaces SIGTERM.

    REKINDLE_NOTICE=aws      spot/instance-action of the instance, two minutes before the
    interruption
    REKINDLE_NOTICE=azure    a scheduled event Preempt of this machine, 30 seconds before the
    interruption

`python -m rekindle.training.launch.notice` polls until a notice appears, then sends SIGTERM to its
parent, the launcher, whose workers then leave after their step. An unreachable metadata service
counts as no notice. Source: the clouds' documentation of spot interruption notices (IMDSv2; the
instance's hop limit must admit pods) and of Scheduled Events.
"""

import json
import os
import signal
import sys
import time
from http.client import HTTPConnection, HTTPException

from argolocal.common.linux import die_with_parent
from argolocal.common.processes import python_command
from rekindle.errors import say

# environment variable with the cloud (`aws` or `azure`) and, after a space, an address that
# replaces METADATA_ADDRESS
VARIABLE = "REKINDLE_NOTICE"
METADATA_ADDRESS = "169.254.169.254"
POLL_INTERVAL_S = 2.0
REQUEST_TIMEOUT_S = 1.0


def is_announced() -> bool:
    """Return True if this node is about to be interrupted."""
    cloud, _, address = os.environ.get(VARIABLE, "").partition(" ")
    try:
        return bool(cloud) and {"aws": _has_aws_notice, "azure": _has_azure_notice}[cloud](
            address or METADATA_ADDRESS
        )
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return False


def watch() -> None:
    """Start the polling process, if REKINDLE_NOTICE is set."""
    if os.environ.get(VARIABLE):
        command = python_command("-m", "rekindle.training.launch.notice")
        os.posix_spawn(sys.executable, command, os.environ, setsigmask=[])


def _has_aws_notice(address: str) -> bool:
    token = _request(
        address, "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"
    )
    return bool(
        _request(
            address, "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
        )
    )


def _has_azure_notice(address: str) -> bool:
    headers = {"Metadata": "true"}
    name = _request(
        address, "/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers
    )
    events = json.loads(
        _request(address, "/metadata/scheduledevents?api-version=2020-07-01", headers)
    )["Events"]
    # the service lists the events of the whole scale set
    return any(event["EventType"] == "Preempt" and name in event["Resources"] for event in events)


def _request(address: str, path: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return the body of a response with status 200, or ""."""
    connection = HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read(1 << 20).decode()
        if response.status == 200:
            return body
        return ""
    finally:
        connection.close()


def main() -> None:
    """Send SIGTERM to the parent after a notice."""
    parent = os.getppid()
    die_with_parent(parent)
    while not is_announced():
        time.sleep(POLL_INTERVAL_S)
    say("this node is about to be interrupted: its workers leave after their step")
    os.kill(parent, signal.SIGTERM)


if __name__ == "__main__":
    main()
