"""Tests of requests to a run: each stop, pause or approval has its effect once, also if the run has
no process yet."""

import threading
from pathlib import Path
from typing import Any

import pytest

from argolocal.engine import suspend
from argolocal.runner import requests
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.requests import NodeChange, RunRequest
from argolocal.runner.retry_workflow import reset_for_retry
from argolocal.runner.run import LocalRun
from argolocal.state.journal import RunFiles, Status
from tests import builders
from tests.argolocal.running import execute_manifest, resume_run
from tests.waiting import until


def make_step_template(name: str, command: str) -> dict[str, Any]:
    return {"name": name, "container": builders.make_shell_container(command)}


def make_gate_template() -> dict[str, Any]:
    output = {"name": "go", "valueFrom": {"supplied": {}, "default": "no"}}
    return {"name": "gate", "suspend": {}, "outputs": {"parameters": [output]}}


def make_steps_template(*names: str) -> dict[str, Any]:
    return {"name": "main", "steps": [[{"name": name, "template": name}] for name in names]}


class Background:
    """A run that a thread of the test executes. Other processes see the files of this run."""

    def __init__(self, home: Path, manifest: dict[str, Any]) -> None:
        self.run = LocalRun.create(manifest, None, LocalCluster(home))
        self.files = RunFiles(home, self.run.name)
        self.status: Status = {}
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.status = self.run.run()

    def start(self) -> None:
        self.thread.start()

    def wait(self) -> Status:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.status

    def suspended(self) -> list[Any]:
        return suspend.list_suspended_nodes(self.files.load()[0])


def make_gated_workflow(**spec: Any) -> dict[str, Any]:
    return builders.make_workflow(
        make_steps_template("gate", "after"),
        make_gate_template(),
        make_step_template("after", "true"),
        **spec,
    )


def test_a_suspended_step_can_be_set_and_then_resumed(tmp_path: Path) -> None:
    background = Background(tmp_path, make_gated_workflow())
    background.start()
    until("the step waits", background.suspended)
    (node,) = background.suspended()

    change = NodeChange("", "please look", {"go": "yes"})
    assert requests.send(background.files, RunRequest({node["id"]: change}))
    (node,) = background.suspended()
    assert node["message"] == "please look"
    assert node["outputs"]["parameters"] == [{"name": "go", "value": "yes"}]

    assert requests.send(background.files, RunRequest({node["id"]: NodeChange()}))
    status = background.wait()
    assert status["phase"] == "Succeeded"
    assert status["nodes"][node["id"]]["phase"] == "Succeeded"


def test_a_rejected_step_fails_its_run(tmp_path: Path) -> None:
    background = Background(tmp_path, make_gated_workflow())
    background.start()
    until("the step waits", background.suspended)
    (node,) = background.suspended()
    requests.send(background.files, RunRequest({node["id"]: NodeChange("Failed", "rejected")}))
    status = background.wait()
    assert status["phase"] == "Failed"
    assert status["nodes"][node["id"]]["message"] == "rejected"


@pytest.mark.parametrize(("strategy", "has_exit_handler"), [("Stop", True), ("Terminate", False)])
def test_a_run_that_is_shut_down_fails_and_only_stop_runs_its_exit_handler(
    tmp_path: Path, strategy: str, has_exit_handler: bool
) -> None:
    templates = [
        make_steps_template("long"),
        make_step_template("long", "sleep 60"),
        make_step_template("bye", "true"),
    ]
    background = Background(tmp_path, builders.make_workflow(*templates, onExit="bye"))
    background.start()
    until("a step runs", lambda: background.files.load()[0]["nodes"])
    assert requests.send(background.files, RunRequest(shutdown=strategy))

    status = background.wait()
    assert status["phase"] == "Failed"
    assert status["message"] == f"Stopped with strategy '{strategy}'"
    names = {node["name"] for node in status["nodes"].values()}
    assert ("w.onExit" in names) == has_exit_handler


def test_a_request_to_a_run_without_a_process_waits_for_its_start(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    mark = tmp_path / "mark"
    run = LocalRun.create(
        builders.make_workflow(make_step_template("main", f"touch {mark}")), None, cluster
    )
    run.files.close()
    files = RunFiles(tmp_path, "w")

    assert not requests.send(files, RunRequest(suspend=True))
    assert not requests.send(files, RunRequest(shutdown="Stop"))
    assert requests.read_pending(files) == RunRequest(suspend=True, shutdown="Stop")

    assert resume_run("w", cluster)["phase"] == "Failed"
    assert not mark.exists()
    assert requests.read_pending(files) is None


def test_a_stopped_run_can_be_retried(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    run = LocalRun.create(builders.make_workflow(make_step_template("main", "true")), None, cluster)
    run.files.close()
    requests.send(RunFiles(tmp_path, "w"), RunRequest(shutdown="Terminate"))
    assert resume_run("w", cluster)["phase"] == "Failed"
    assert resume_run("w", cluster)["phase"] == "Succeeded"


def test_a_step_that_succeeded_can_be_restarted_with_all_steps_after_it(tmp_path: Path) -> None:
    templates = [
        make_steps_template("one", "two", "three"),
        *(make_step_template(name, "true") for name in ONE_TO_THREE),
    ]
    status = execute_manifest(builders.make_workflow(*templates), {}, LocalCluster(tmp_path))
    ids = {node["displayName"]: id for id, node in status["nodes"].items()}

    kept_nodes = reset_for_retry(status, [ids["two"]])["nodes"]
    assert ids["one"] in kept_nodes
    assert ids["two"] not in kept_nodes
    assert ids["three"] not in kept_nodes
    assert kept_nodes["w"]["phase"] == "Running"
    assert kept_nodes[ids["[1]"]]["phase"] == "Running"


ONE_TO_THREE = ("one", "two", "three")


def test_a_run_resumes_in_a_home_with_stored_templates(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    for kind in ("WorkflowTemplate", "CronWorkflow"):
        (tmp_path / "objects" / kind).mkdir(parents=True)
    for name in (".lock", ".resource-version"):
        (tmp_path / "objects" / name).touch()
    run = LocalRun.create(builders.make_workflow(make_step_template("main", "true")), None, cluster)
    run.files.close()
    assert resume_run("w", cluster)["phase"] == "Succeeded"
