"""`rekindle submit`, `lint --cluster` and `schedule` refuse jobs that Kueue can never admit."""

import json

import pytest
from click.testing import CliRunner, Result

from rekindle.cli import commands
from rekindle.errors import ConfigError
from tests.commands import ROOT
from tests.http_server import Answer, HttpServer
from tests.rekindle.cluster.kueue import objects
from tests.rekindle.cluster.server import ApiServer, make_status

CONFIG = str(ROOT / "configs/digits.yaml")
QUEUED = ["--set", "cluster.gang=kueue", "--set", "cluster.queue=research"]


@pytest.fixture(autouse=True)
def kueue(server: ApiServer) -> None:
    objects.install_kueue(server)


def invoke_command(*arguments: str) -> Result:
    return CliRunner().invoke(commands, [*arguments, *QUEUED], standalone_mode=False)


def list_created_paths(server: ApiServer) -> list[str]:
    return [path for method, path, _ in server.requests if method == "POST"]


@pytest.mark.parametrize("command", [["submit", "--no-cache"], ["schedule"]])
def test_a_job_that_can_never_be_admitted_creates_nothing(
    server: ApiServer, command: list[str]
) -> None:
    schedule = ["--set", "schedule.cron=0 3 * * 1"] if command == ["schedule"] else []
    objects.configure_kueue(server, integrations={"frameworks": ["pod"]})
    result = invoke_command(command[0], CONFIG, *command[1:], *schedule)
    assert isinstance(result.exception, ConfigError)
    (sentence,) = result.exception.lines
    assert "`- kubeflow.org/pytorchjob` added to integrations.frameworks" in sentence
    assert list_created_paths(server) == []

    objects.configure_kueue(server)
    assert invoke_command(command[0], CONFIG, *command[1:], *schedule).exception is None
    assert list_created_paths(server)


def test_run_now_and_backfill_refuse_a_schedule_that_can_never_be_admitted(
    server: ApiServer,
) -> None:
    cron = ["--set", "schedule.cron=0 3 * * 1"]
    assert invoke_command("schedule", CONFIG, *cron).exception is None
    first_requests = len(server.requests)
    days = ["--from", "2026-01-05", "--to", "2026-01-05", "--cluster"]
    run_now = ["run-now", "digits"]
    backfill = ["backfill", CONFIG, *cron, *days, *QUEUED]

    server.remove(objects.QUEUES, "research")
    for command in (run_now, backfill):
        result = CliRunner().invoke(commands, command, standalone_mode=False)
        assert isinstance(result.exception, ConfigError), result.output
        assert "the LocalQueue research does not exist" in str(result.exception)
    assert all(method == "GET" for method, _, _ in server.requests[first_requests:])

    server.put(
        objects.QUEUES, {"metadata": {"name": "research"}, "spec": {"clusterQueue": "shared"}}
    )
    result = CliRunner().invoke(commands, run_now, standalone_mode=False)
    assert result.exception is None
    assert len(list_created_paths(server)) == 3, "the template, the schedule and the run"


def test_a_template_that_may_not_be_read_is_a_note(server: ApiServer) -> None:
    assert invoke_command("schedule", CONFIG, "--set", "schedule.cron=0 3 * * 1").exception is None
    server.refuse("GET", "/workflowtemplates/digits", 403, make_status(403, "Forbidden", "no"))
    result = CliRunner().invoke(commands, ["run-now", "digits", "--yes"], standalone_mode=False)
    assert result.exception is None
    assert "note: the WorkflowTemplate digits is not compared with queues: " in result.output


def test_a_submit_through_an_argo_server_compares_with_the_queues_of_the_kubeconfig(
    server: ApiServer,
) -> None:
    with HttpServer(lambda _: Answer(body='{"items": []}')) as argo:
        submit = ["submit", CONFIG, "--no-cache", "-n", "models", "--argo-server", argo.url]
        server.remove(objects.QUEUES, "research")
        result = invoke_command(*submit)
        assert isinstance(result.exception, ConfigError)
        problem, hint = result.exception.lines
        assert "the LocalQueue research does not exist in namespace models" in problem
        assert "if the Argo server belongs to another cluster, give its context" in hint
        assert argo.requests == []

        server.put(
            objects.QUEUES, {"metadata": {"name": "research"}, "spec": {"clusterQueue": "shared"}}
        )
        assert invoke_command(*submit).exception is None
        assert argo.requests[-1].method == "POST"
        assert list_created_paths(server) == []


@pytest.mark.parametrize("fault", ["no kubeconfig", "the API does not answer"])
def test_without_a_kubernetes_api_one_note_says_that_nothing_was_compared(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no kubeconfig":
        monkeypatch.setenv("KUBECONFIG", "/dev/null")
    else:
        server.refuse(
            "GET", "/apis/kueue", 503, make_status(503, "Unavailable", "restarts"), times=9
        )

    with HttpServer(lambda _: Answer(body='{"items": []}')) as argo:
        submit = ["submit", CONFIG, "--no-cache", "-n", "models", "--argo-server", argo.url]
        result = invoke_command(*submit)
        assert result.exception is None
        notes = [line for line in result.output.splitlines() if "compared" in line]
        assert len(notes) == 1, result.output
        assert argo.requests[-1].method == "POST"
        assert len(server.requests) <= 1, "an API that the run does not need is asked once"

        result = CliRunner().invoke(commands, submit, standalone_mode=False)
        assert "compared" not in result.output, "without queues there is nothing to compare"


def test_lint_compares_the_pods_with_a_cluster_only_on_request(server: ApiServer) -> None:
    server.remove(objects.QUEUES, "research")
    assert invoke_command("lint", CONFIG).return_value == 0
    assert server.requests == []

    result = invoke_command("lint", CONFIG, "--cluster", "-o", "json")
    assert result.return_value == 1
    (finding,) = [found for found in json.loads(result.stdout) if found["rule"] == "queue"]
    assert finding["fatal"]
    assert "the LocalQueue research does not exist in namespace models" in finding["message"]
    assert list_created_paths(server) == []


def test_lint_names_the_steps_that_do_not_wait_in_the_queue() -> None:
    text = invoke_command("lint", CONFIG, "--set", "cluster.unqueued=[report, verify]").output
    assert "the pods of verify, report do not wait in the queue of the other pods" in text
    assert "do not wait" not in invoke_command("lint", CONFIG).output
