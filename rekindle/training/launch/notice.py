"""Polls for the cloud's notice that it will interrupt a spot node. The notice comes before SIGTERM
or instead of SIGTERM.

    REKINDLE_NOTICE=aws      instance metadata spot/instance-action, two minutes before
    REKINDLE_NOTICE=azure    scheduled event Preempt of this machine, 30 seconds before

`python -m rekindle.training.launch.notice` polls until a notice appears, then sends SIGTERM to its
parent, the launcher, whose workers then leave after their step. While the metadata service is
unavailable, no notice is assumed. Sources: the documentation of AWS, spot instance interruption
notices; Azure, Scheduled Events. The requests to AWS use IMDSv2: its hop limit, a setting of the
instance, must let pods reach the service.
"""

import json
import os
import signal
import sys
import time
from http.client import HTTPConnection, HTTPException

from argolocal.common.linux import die_with_parent
from argolocal.common.processes import make_python_command
from rekindle.errors import write_stderr
from rekindle.kubernetes_names import REKINDLE_NOTICE

# default address of the metadata service; REKINDLE_NOTICE is the cloud (`aws` or `azure`),
# optionally followed by a space and an address to use instead of this default
METADATA_ADDRESS = "169.254.169.254"
POLL_INTERVAL_S = 2.0
REQUEST_TIMEOUT_S = 1.0


def is_interruption_announced() -> bool:
    """Return True if this node is about to be interrupted."""
    cloud_name, _, metadata_address = os.environ.get(REKINDLE_NOTICE, "").partition(" ")
    try:
        return bool(cloud_name) and {"aws": _has_aws_notice, "azure": _has_azure_notice}[
            cloud_name
        ](metadata_address or METADATA_ADDRESS)
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return False


def start_polling_process() -> None:
    """If REKINDLE_NOTICE is set, start the process that polls for a notice."""
    if os.environ.get(REKINDLE_NOTICE):
        command = make_python_command("-m", "rekindle.training.launch.notice")
        os.posix_spawn(sys.executable, command, os.environ, setsigmask=[])


def _has_aws_notice(metadata_address: str) -> bool:
    session_token = _request_metadata(
        metadata_address, "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT"
    )
    return bool(
        _request_metadata(
            metadata_address,
            "/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": session_token},
        )
    )


def _has_azure_notice(metadata_address: str) -> bool:
    headers = {"Metadata": "true"}
    instance_name = _request_metadata(
        metadata_address,
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        headers,
    )
    scheduled_events = json.loads(
        _request_metadata(
            metadata_address, "/metadata/scheduledevents?api-version=2020-07-01", headers
        )
    )["Events"]
    # select this machine, because the metadata service also lists the events of other machines of
    # the scale set
    return any(
        scheduled_event["EventType"] == "Preempt" and instance_name in scheduled_event["Resources"]
        for scheduled_event in scheduled_events
    )


def _request_metadata(
    metadata_address: str, request_path: str, headers: dict[str, str], method: str = "GET"
) -> str:
    """Return the body of a response of the metadata service, or "" if its status is not 200."""
    connection = HTTPConnection(metadata_address, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, request_path, headers=headers)
        response = connection.getresponse()
        body = response.read(1 << 20).decode()
        if response.status == 200:
            return body
        return ""
    finally:
        connection.close()


def main() -> None:
    """Poll until a notice appears, then send SIGTERM to the parent process."""
    parent_pid = os.getppid()
    die_with_parent(parent_pid)
    while not is_interruption_announced():
        time.sleep(POLL_INTERVAL_S)
    write_stderr("this node is about to be interrupted: its workers leave after their step")
    os.kill(parent_pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
