"""The cloud's word that this node is about to be taken, which comes before any SIGTERM, or in place of it.

    REKINDLE_NOTICE=aws      spot/instance-action of the instance, two minutes before
    REKINDLE_NOTICE=azure    a scheduled event Preempt of this machine, 30 seconds before

`python -m rekindle.training.launch.notice` asks again and again, and then sends its parent SIGTERM: the launcher, whose
workers leave in order. Where the metadata service cannot be asked there is no notice. Source: the clouds' documentation
of spot interruption notices (IMDSv2; the hop limit of an instance must let pods through) and of Scheduled Events.
"""

import json
import os
import signal
import sys
import time
from http.client import HTTPConnection, HTTPException

from argolocal.common.linux import die_with_parent
from argolocal.common.processes import python
from rekindle.errors import say

VARIABLE = "REKINDLE_NOTICE"  # environment: the cloud, and another address of its metadata service
ADDRESS = "169.254.169.254"
PERIOD = 2.0  # seconds between two questions
TIMEOUT = 1.0  # seconds for an answer


def announced() -> bool:
    """Whether this node is about to be taken."""
    cloud, _, address = os.environ.get(VARIABLE, "").partition(" ")
    try:
        return bool(cloud) and {"aws": _aws, "azure": _azure}[cloud](address or ADDRESS)
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return False


def watch() -> None:
    """Start the process that asks, if there is a cloud to be asked."""
    if os.environ.get(VARIABLE):
        command = python("-m", "rekindle.training.launch.notice")
        os.posix_spawn(sys.executable, command, os.environ, setsigmask=[])


def _aws(address: str) -> bool:
    token = _answer(address, "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return bool(_answer(address, "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def _azure(address: str) -> bool:
    """Events are those of the whole scale set."""
    about = {"Metadata": "true"}
    name = _answer(address, "/metadata/instance/compute/name?api-version=2021-02-01&format=text", about)
    events = json.loads(_answer(address, "/metadata/scheduledevents?api-version=2020-07-01", about))["Events"]
    return any(event["EventType"] == "Preempt" and name in event["Resources"] for event in events)


def _answer(address: str, path: str, headers: dict[str, str], method: str = "GET") -> str:
    """The body of a 200, else nothing."""
    connection = HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read(1 << 20).decode()
        return body if response.status == 200 else ""
    finally:
        connection.close()


def main() -> None:
    """Tell the parent, once."""
    parent = os.getppid()
    die_with_parent(parent)
    while not announced():
        time.sleep(PERIOD)
    say("this node is about to be taken: its workers leave")
    os.kill(parent, signal.SIGTERM)


if __name__ == "__main__":
    main()
