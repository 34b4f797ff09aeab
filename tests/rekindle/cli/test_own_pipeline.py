"""Every command of `--help`, run in a user's project with its own pipelines, steps and workload.

Commands that only read share one run, which is a week of a backfill; its training waits until the
test has scaled it.
"""

import json
import os
import re
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rekindle.cli import commands
from rekindle.local.services.services import Services
from tests.commands import BIN, ROOT, Shell
from tests.forked import Prompt
from tests.ports import free_port
from tests.rekindle.cli.stranger import leaf_commands
from tests.rekindle.cli.user_project import run_make
from tests.rekindle.cluster.healthy import HealthyCluster
from tests.rekindle.cluster.server import ApiServer
from tests.waiting import until

ARGO = "/apis/argoproj.io/v1alpha1/namespaces/models"
WEEK = "--from 2026-03-02 --to 2026-03-08"
CONFIG = "configs/shop.yaml"
# command → command lines and patterns of their output; {run} is the shared run
READING_COMMANDS: dict[str, list[tuple[str, str]]] = {
    "config": [(f"config {CONFIG}", r"workload +steps.paced +configs/shop.yaml\n")],
    "render": [
        (f"render {CONFIG}", r"- steps\.card\n"),
        (f"render {CONFIG} --kind cron", "kind: CronWorkflow"),
    ],
    "lint": [(f"lint {CONFIG} configs/asking.yaml --set data.source=s3://a/b.csv", "")],
    "check": [(f"check {CONFIG}", r"model +Sequential: 133 parameters")],
    "status": [("status", r"{run} +Succeeded +keep"), ("status {run}", r"card +Succeeded")],
    "logs": [("logs {run} prepare", r"\| data until 2026-03-02T03:00:00\+00:00\n")],
    "explain": [("explain {run}", r"{run}: Succeeded\n\n\d workers? trained \d+ steps")],
    "get": [("get {run}", r"card/card +1 "), ("get {run} card/card --to card.md", "")],
    "put": [("put data/power.csv", r"s3://.*/data/power.csv\n")],
    "ui": [("ui {run} --mlflow", r"http://127.0.0.1")],
    "server": [("server --print-unit user", r"ExecStart=.* -m rekindle server\n")],
    "env": [("env", r"MLFLOW_TRACKING_URI=")],
    "cache ls": [("cache ls", r"steps.train +{run}/train ")],
    "cache prune": [("cache prune --days 0", r"{run}/train")],
    "prune": [("prune --keep-runs 0", r"{run}")],
    "trust": [("trust .rekindle", "")],
    "step": [("step steps.card --metrics {{}} --verdict keep --output card=kept.md", "")],
    "doctor": [("doctor", r"object store")],
    "platform render": [
        (
            "platform render -n models --endpoint http://s3:9000 --mlflow http://mlflow",
            r"kind: Role\n",
        )
    ],
}
# command → the test below that runs it
TESTED_HERE = {
    "run": "test_a_suspended_run_is_stopped_and_resumed",
    "stop": "test_a_suspended_run_is_stopped_and_resumed",
    "resume": "test_a_suspended_run_is_stopped_and_resumed",
    "plan": "test_a_plan_lists_the_tasks_that_would_run",
    "backfill": "test_a_backfilled_week_is_evaluated_with_the_data_of_its_time",
    "scale": "test_a_training_is_scaled_while_it_runs",
    "schedule": "test_a_schedule_is_applied_started_and_deleted",
    "run-now": "test_a_schedule_is_applied_started_and_deleted",
    "unschedule": "test_a_schedule_is_applied_started_and_deleted",
    "submit": "test_a_run_is_submitted_and_deleted",
    "delete": "test_a_run_is_submitted_and_deleted",
    "demo chaos": "test_the_demo_runs_in_every_folder",
    "platform check": "test_platform_check_uses_the_config",
    "rollback": "test_rollback_serves_an_earlier_release",
    "down": "test_rollback_serves_an_earlier_release",
}
# command → the file whose test runs the command in a user's project
TESTED_ELSEWHERE = {
    "init": "tests/rekindle/test_project.py",
    "images build": "tests/rekindle/cluster/test_images.py",
    "sweep": "tests/pipelines/test_sweep.py",
    "rerun": "tests/rekindle/cli/test_rerun.py",
    "reproduce": "tests/rekindle/operations/reproduce/test_reproduction.py",
}


@dataclass(frozen=True)
class Project:
    """A user's project, with the run that the tests share."""

    prompt: Prompt
    run: str
    backfilled: dict
    scaled: subprocess.CompletedProcess[str]

    def __call__(self, command: str, **environment: str) -> str:
        """Run a command that must succeed, and return the output of the command."""
        result = self.prompt(f"rekindle {command}", **environment)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout


def waiting_run(folder: Path) -> str:
    """Return the run whose training has a waiting worker, or ""."""
    logs = folder.glob(".rekindle/runs/*/logs/*train*.log")
    return next((log.parents[1].name for log in logs if "worker" in log.read_text()), "")


@pytest.fixture(scope="module")
def environment(s3_environment: dict[str, str], services: Services) -> dict[str, str]:
    kept_variables = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_"))
    }

    mlflow = services.url("mlflow")
    services.ready()

    settings = {
        **s3_environment,
        "MLFLOW_TRACKING_URI": mlflow,
        **services.login(),
        "KUBECONFIG": "/none",
        "REKINDLE_SERVE__PORT": str(free_port()),
    }

    return {**kept_variables, **settings, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def shared_folder() -> Iterator[Path]:
    """A folder that pods share with this machine; it is not in /tmp, because each pod has its own
    /tmp."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], shared_folder: Path
) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("own") / "shop"
    run_make(folder, shared_folder / "go")
    command = f"rekindle backfill {CONFIG} {WEEK} -o json".split()

    with Prompt(folder, environment) as prompt, (folder / "backfill.log").open("w") as log:
        backfill = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            read_log = (folder / "backfill.log").read_text
            run = until("a worker to wait", lambda: waiting_run(folder), 120, evidence=read_log)
            scaled = prompt(f"rekindle scale {run} 2 -o json")
            second_log = f".rekindle/runs/{run}/logs/{run}-train-worker-1.log"

            until(
                "the second worker to start",
                lambda: (folder / second_log).exists(),
                evidence=lambda: scaled,
            )

            (shared_folder / "go").touch()
            out, _ = backfill.communicate(timeout=120)
        finally:
            backfill.kill()
            backfill.wait()

        assert backfill.returncode == 0, out + (folder / "backfill.log").read_text()
        yield Project(prompt, run, json.loads(out), scaled)
        prompt("rekindle down")


def test_every_command_is_run_in_a_user_project() -> None:
    names = [*READING_COMMANDS, *TESTED_HERE, *TESTED_ELSEWHERE]
    assert sorted(names) == sorted(leaf_commands(commands))
    text = Path(__file__).read_text()
    assert [test for name, test in TESTED_HERE.items() if f"def {test}(" not in text] == []
    assert [
        name
        for name, file in TESTED_ELSEWHERE.items()
        if name.split()[0] not in (ROOT / file).read_text()
    ] == []


@pytest.mark.parametrize(
    "command",
    # `check` and `lint` are slow tests, because they load torch; tests/rekindle/cli/test_check.py
    # has a fast test
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("check", "lint") else name
        for name in READING_COMMANDS
    ],
)
def test_a_command_that_reads_runs_uses_the_project(project: Project, command: str) -> None:
    for line, pattern in READING_COMMANDS[command]:
        out = project(line.format(run=project.run))
        assert re.search(pattern.replace("{run}", project.run), out), out


def test_a_backfilled_week_is_evaluated_with_the_data_of_its_time(project: Project) -> None:
    (week,) = project.backfilled["weeks"]
    assert week["workflow"] == project.run
    assert week["phase"] == "Succeeded"
    assert week["gate"] == "release"
    assert week["scheduled"] == "2026-03-02T03:00:00Z"
    assert 0 < week["metrics"]["rmse"] < 500


def test_a_plan_lists_the_tasks_that_would_run(project: Project) -> None:
    planned = project.prompt(f"rekindle plan {CONFIG} --no-cache")
    assert planned.returncode == 10, planned
    assert re.search(r"prepare +runs", planned.stdout), planned


def test_a_training_is_scaled_while_it_runs(project: Project) -> None:
    assert project.scaled.returncode == 0, project.scaled.stderr
    scaled = json.loads(project.scaled.stdout)
    assert scaled["workflow"] == project.run
    assert scaled["before"] == 1
    assert scaled["workers"] == 2
    refused = project.prompt(f"rekindle scale {project.run} 1")
    assert refused.returncode == 2
    assert "only a running training can be scaled" in refused.stderr


@pytest.mark.slow
def test_a_suspended_run_is_stopped_and_resumed(project: Project) -> None:
    # this source has been linted above, so the workload is not tried again
    command = [
        "rekindle",
        "run",
        "configs/asking.yaml",
        "--yes",
        "--set",
        "data.source=s3://a/b.csv",
    ]

    folder = project.prompt.folder
    environment = project.prompt.environment

    run = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    try:
        suspended = re.compile(r"^(asking-\w+) +Running", re.MULTILINE)
        name = until("the run to be listed", lambda: suspended.search(project("status")))[1]
        until("the step to wait", lambda: re.search("approval +Running", project(f"status {name}")))
        assert project(f"stop {name}") == f"stopped {name}\n"
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()

    assert run.returncode == 1
    assert output.splitlines()[-1] == f"resume  rekindle resume {name}"
    resumed = subprocess.Popen(
        ["rekindle", "resume", name, "--yes"],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    try:
        until(
            "the step to wait again",
            lambda: re.search("approval +Running", project(f"status {name}")),
        )
        project(f"resume {name}")
        output, _ = resumed.communicate(timeout=60)
    finally:
        resumed.kill()
        resumed.wait()

    assert resumed.returncode == 0, output
    assert "card succeeded" in output, output


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running


@pytest.mark.slow
def test_a_schedule_is_applied_started_and_deleted(project: Project, cluster: ApiServer) -> None:
    reach = {"KUBECONFIG": str(cluster.kubeconfig), "REKINDLE_DATA__SOURCE": "s3://raw/power.csv"}
    assert "shop" in project(f"schedule {CONFIG}", **reach)
    assert "shop" in project(f"schedule {CONFIG} --suspend", **reach)
    assert re.search(r"^shop .*0 3 \* \* 1", project("status --cluster", **reach), re.MULTILINE)
    run = json.loads(project("run-now shop -o json", **reach))["workflow"]
    workflows = cluster.objects[f"{ARGO}/workflows"]
    assert list(workflows) == [run]
    assert workflows[run]["spec"]["workflowTemplateRef"] == {"name": "shop"}
    project("unschedule shop", **reach)
    assert not cluster.objects[f"{ARGO}/cronworkflows"]
    assert not cluster.objects[f"{ARGO}/workflowtemplates"]


def test_a_run_is_submitted_and_deleted(project: Project, cluster: ApiServer) -> None:
    reach = {"KUBECONFIG": str(cluster.kubeconfig), "REKINDLE_DATA__SOURCE": "s3://raw/power.csv"}
    run = json.loads(project(f"submit {CONFIG} -o json --no-cache", **reach))["workflow"]
    templates = cluster.objects[f"{ARGO}/workflows"][run]["spec"]["templates"]
    assert "card" in [template["name"] for template in templates]
    assert run in project("status --cluster", **reach)
    assert project(f"delete {run} --yes", **reach) == f"deleted {run}\n"
    assert not cluster.objects[f"{ARGO}/workflows"]


def test_platform_check_uses_the_config(project: Project, tmp_path: Path) -> None:
    with HealthyCluster(tmp_path) as server:
        command = f"platform check {CONFIG} --set cluster.image=r/own:1 --wait 5"
        out = project(command, KUBECONFIG=str(server.kubeconfig))
    assert "image r/own:1" in out


@pytest.mark.slow
def test_the_demo_runs_in_every_folder(project: Project) -> None:
    out = project("demo chaos --workers 1 --steps 20 --seconds-between 100")
    assert "EQUAL" in out


@pytest.mark.slow
# this test executes two complete runs
@pytest.mark.timeout(900)
def test_rollback_serves_an_earlier_release(project: Project) -> None:
    name = f"shop-{uuid.uuid4().hex[:6]}"
    shell = Shell(project.prompt.folder, project.prompt.environment | {"REKINDLE_NAME": name})
    released = []

    for seed in (1, 2):
        result = shell(
            f"rekindle run {CONFIG} --set train.seed={seed} --set gate.tolerance=1000 -o json"
        )
        assert result.returncode == 0, result.stderr
        released.append(json.loads(result.stdout))

    first_hash, second_hash = (run["model_sha256"] for run in released)
    endpoint = released[1]["endpoint"]
    assert first_hash != second_hash
    assert served_sha256(endpoint) == second_hash
    back = shell(f"rekindle rollback {name}")
    assert back.returncode == 0, back.stderr
    assert served_sha256(endpoint) == first_hash
    assert f"stopped deployment {name}-" in shell("rekindle down").stdout


def served_sha256(endpoint: str) -> str:
    """Return the sha256 of the deployed model."""
    with urllib.request.urlopen(f"{endpoint}/health/ready") as answer:
        return json.load(answer)["sha256"]
