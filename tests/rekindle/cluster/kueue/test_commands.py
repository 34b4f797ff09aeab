"""`rekindle submit`, `lint --cluster` and `schedule` refuse jobs that Kueue can never admit."""

import json

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import commands
from rekindle.errors import ConfigError
from tests.commands import ROOT
from tests.rekindle.cluster.kueue import objects
from tests.rekindle.cluster.server import ApiServer

CONFIG = str(ROOT / "configs/digits.yaml")
QUEUED = ["--set", "cluster.gang=kueue", "--set", "cluster.queue=research"]


@pytest.fixture(autouse=True)
def kueue(server: ApiServer) -> None:
    objects.install(server)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, [*arguments, *QUEUED], standalone_mode=False)


def created(server: ApiServer) -> list[str]:
    return [path for method, path, _ in server.requests if method == "POST"]


@pytest.mark.parametrize("command", [["submit", "--no-cache"], ["schedule"]])
def test_a_job_that_can_never_be_admitted_creates_nothing(
    server: ApiServer, command: list[str]
) -> None:
    schedule = ["--set", "schedule.cron=0 3 * * 1"] if command == ["schedule"] else []
    objects.configure(server, integrations={"frameworks": ["pod"]})
    result = invoke(command[0], CONFIG, *command[1:], *schedule)
    assert isinstance(result.exception, ConfigError)
    (sentence,) = result.exception.lines
    assert "`- kubeflow.org/pytorchjob` added to integrations.frameworks" in sentence
    assert created(server) == []

    objects.configure(server)
    assert invoke(command[0], CONFIG, *command[1:], *schedule).exception is None
    assert created(server)


def test_lint_compares_the_pods_with_a_cluster_only_on_request(server: ApiServer) -> None:
    server.remove(objects.QUEUES, "research")
    assert invoke("lint", CONFIG).return_value == 0
    assert server.requests == []

    result = invoke("lint", CONFIG, "--cluster", "-o", "json")
    assert result.return_value == 1
    (finding,) = [found for found in json.loads(result.stdout) if found["rule"] == "queue"]
    assert finding["fatal"]
    assert "the LocalQueue research does not exist in namespace models" in finding["message"]
    assert created(server) == []


def test_lint_names_the_steps_that_do_not_wait_in_the_queue() -> None:
    text = invoke("lint", CONFIG, "--set", "cluster.unqueued=[report, verify]").output
    assert "the pods of verify, report do not wait in the queue of the other pods" in text
    assert "do not wait" not in invoke("lint", CONFIG).output
