"""Every command of `--help`, typed in a project of one's own: its pipelines, its steps, its workload.

One run is shared by all that look at it: the one week of a backfill, whose training waits while it is scaled.
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
from tests.rekindle.cli.own import make
from tests.rekindle.cli.test_stranger import leaves
from tests.rekindle.cluster.healthy import HealthyCluster
from tests.rekindle.cluster.server import ApiServer
from tests.waiting import until

ARGO = "/apis/argoproj.io/v1alpha1/namespaces/models"
WEEK = "--from 2026-03-02 --to 2026-03-08"
CONFIG = "configs/shop.yaml"
# command → what is typed, and what its output must have; {run} is the shared run
LOOKS: dict[str, list[tuple[str, str]]] = {
    "config": [(f"config {CONFIG}", r"workload +steps.paced +configs/shop.yaml\n")],
    "render": [(f"render {CONFIG}", r"- steps\.card\n"), (f"render {CONFIG} --kind cron", "kind: CronWorkflow")],
    "lint": [(f"lint {CONFIG} configs/asking.yaml --set data.source=s3://a/b.csv", "")],
    "status": [("status", r"{run} +Succeeded +keep"), ("status {run}", r"card +Succeeded")],
    "logs": [("logs {run} prepare", r"\| data until 2026-03-02T03:00:00\+00:00\n")],
    "explain": [("explain {run}", r"{run}: Succeeded\n\n\d workers? trained \d+ steps")],
    "get": [("get {run}", r"card/card +1 "), ("get {run} card/card --to card.md", "")],
    "put": [("put data/power.csv", r"s3://.*/data/power.csv\n")],
    "ui": [("ui {run}", r"http://127.0.0.1")],
    "env": [("env", r"MLFLOW_TRACKING_URI=")],
    "cache ls": [("cache ls", r"steps.train +{run}/train ")],
    "cache prune": [("cache prune --days 0", r"{run}/train")],
    "prune": [("prune --keep-runs 0", r"{run}")],
    "trust": [("trust .rekindle", "")],
    "step": [("step steps.card --metrics {{}} --verdict keep --output card=kept.md", "")],
    "doctor": [("doctor", r"object store")],
    "platform render": [
        ("platform render -n models --endpoint http://s3:9000 --mlflow http://mlflow", r"kind: Role\n")
    ],
}
HERE = {  # command → the test below that types it
    "run": "test_a_run_that_waits_for_somebody_is_stopped_and_resumed",
    "stop": "test_a_run_that_waits_for_somebody_is_stopped_and_resumed",
    "resume": "test_a_run_that_waits_for_somebody_is_stopped_and_resumed",
    "backfill": "test_a_week_of_the_past_is_judged_with_the_data_of_its_time",
    "scale": "test_a_training_is_scaled_while_it_runs",
    "schedule": "test_a_schedule_is_applied_started_and_deleted",
    "run-now": "test_a_schedule_is_applied_started_and_deleted",
    "unschedule": "test_a_schedule_is_applied_started_and_deleted",
    "submit": "test_a_run_is_submitted_and_deleted",
    "delete": "test_a_run_is_submitted_and_deleted",
    "demo chaos": "test_the_demo_shows_the_same_in_every_folder",
    "platform check": "test_the_check_of_a_namespace_takes_the_config",
    "rollback": "test_an_earlier_release_answers_again",
    "down": "test_an_earlier_release_answers_again",
}
ELSEWHERE = {  # command → the file whose test types it in such a project
    "init": "tests/rekindle/test_project.py",
    "images build": "tests/rekindle/cluster/test_images.py",
    "sweep": "tests/pipelines/test_sweep.py",
}


@dataclass(frozen=True)
class Own:
    """The project with its shared run."""

    typed: Prompt
    run: str
    backfilled: dict
    scaled: subprocess.CompletedProcess[str]

    def __call__(self, command: str, **environment: str) -> str:
        """What the command prints; it must succeed."""
        done = self.typed(f"rekindle {command}", **environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def running(folder: Path) -> str:
    """The run whose training has a worker that waits."""
    logs = folder.glob(".rekindle/runs/*/logs/*train*.log")
    return next((log.parents[1].name for log in logs if "worker" in log.read_text()), "")


@pytest.fixture(scope="module")
def environment(s3_environment: dict[str, str], services: Services) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("S3_", "AWS_", "MLFLOW_", "REKINDLE_"))}
    mlflow = services.url("mlflow")
    services.ready()
    settings = {**s3_environment, "MLFLOW_TRACKING_URI": mlflow, **services.login(), "KUBECONFIG": "/none"}
    settings["REKINDLE_SERVE__PORT"] = str(free_port())
    return {**kept, **settings, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder in which a pod sees what comes later: its /tmp is its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], shared: Path) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own") / "shop"
    make(folder, shared / "go")
    command = f"rekindle backfill {CONFIG} {WEEK} -o json".split()
    with Prompt(folder, environment) as typed, (folder / "backfill.log").open("w") as log:
        backfill = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=log, text=True)  # fmt: skip
        try:
            run = until("a worker to wait", lambda: running(folder), 120, evidence=(folder / "backfill.log").read_text)
            scaled = typed(f"rekindle scale {run} 2 -o json")
            second = f".rekindle/runs/{run}/logs/{run}-train-worker-1.log"
            until("the second worker to start", lambda: (folder / second).exists(), evidence=lambda: scaled)
            (shared / "go").touch()
            out, _ = backfill.communicate(timeout=120)
        finally:
            backfill.kill()
            backfill.wait()
        assert backfill.returncode == 0, out + (folder / "backfill.log").read_text()
        yield Own(typed, run, json.loads(out), scaled)
        typed("rekindle down")


def test_every_command_of_help_is_typed_in_a_project_of_ones_own() -> None:
    names = [*LOOKS, *HERE, *ELSEWHERE]
    assert sorted(names) == sorted(leaves(commands))
    text = Path(__file__).read_text()
    assert [test for name, test in HERE.items() if f"def {test}(" not in text] == []
    assert [name for name, file in ELSEWHERE.items() if name.split()[0] not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("command", LOOKS)
def test_a_command_knows_the_project_and_its_run(own: Own, command: str) -> None:
    for line, pattern in LOOKS[command]:
        out = own(line.format(run=own.run))
        assert re.search(pattern.replace("{run}", own.run), out), out


def test_a_week_of_the_past_is_judged_with_the_data_of_its_time(own: Own) -> None:
    (week,) = own.backfilled["weeks"]
    assert (week["workflow"], week["phase"], week["gate"]) == (own.run, "Succeeded", "release")
    assert week["scheduled"] == "2026-03-02T03:00:00Z" and 0 < week["metrics"]["rmse"] < 500


def test_a_training_is_scaled_while_it_runs(own: Own) -> None:
    assert own.scaled.returncode == 0, own.scaled.stderr
    scaled = json.loads(own.scaled.stdout)
    assert (scaled["workflow"], scaled["before"], scaled["workers"]) == (own.run, 1, 2)
    late = own.typed(f"rekindle scale {own.run} 1")
    assert (late.returncode, "only a running training can be scaled" in late.stderr) == (2, True)


def test_a_run_that_waits_for_somebody_is_stopped_and_resumed(own: Own) -> None:
    command = ["rekindle", "run", "configs/asking.yaml", "--yes"]
    folder, environment = own.typed.folder, own.typed.environment
    run = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        suspended = re.compile(r"^(asking-\w+) +Running", re.MULTILINE)
        name = until("the run to be listed", lambda: suspended.search(own("status")))[1]
        until("it to wait", lambda: re.search("approval +Running", own(f"status {name}")))
        assert own(f"stop {name}") == f"stopped {name}\n"
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert (run.returncode, said.splitlines()[-1]) == (1, f"resume  rekindle resume {name}")
    resumed = subprocess.Popen(["rekindle", "resume", name, "--yes"], cwd=folder, env=environment, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        until("it to wait again", lambda: re.search("approval +Running", own(f"status {name}")))
        own(f"resume {name}")
        said, _ = resumed.communicate(timeout=60)
    finally:
        resumed.kill()
        resumed.wait()
    assert resumed.returncode == 0 and "card succeeded" in said, said


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running


def test_a_schedule_is_applied_started_and_deleted(own: Own, cluster: ApiServer) -> None:
    reach = {"KUBECONFIG": str(cluster.kubeconfig), "REKINDLE_DATA__SOURCE": "s3://raw/power.csv"}
    assert "shop" in own(f"schedule {CONFIG}", **reach)
    assert "shop" in own(f"schedule {CONFIG} --suspend", **reach)
    assert re.search(r"^shop .*0 3 \* \* 1", own("status --cluster", **reach), re.MULTILINE)
    run = json.loads(own("run-now shop -o json", **reach))["workflow"]
    workflows = cluster.objects[f"{ARGO}/workflows"]
    assert list(workflows) == [run] and workflows[run]["spec"]["workflowTemplateRef"] == {"name": "shop"}
    own("unschedule shop", **reach)
    assert not cluster.objects[f"{ARGO}/cronworkflows"] and not cluster.objects[f"{ARGO}/workflowtemplates"]


def test_a_run_is_submitted_and_deleted(own: Own, cluster: ApiServer) -> None:
    reach = {"KUBECONFIG": str(cluster.kubeconfig), "REKINDLE_DATA__SOURCE": "s3://raw/power.csv"}
    run = json.loads(own(f"submit {CONFIG} -o json --no-cache", **reach))["workflow"]
    templates = cluster.objects[f"{ARGO}/workflows"][run]["spec"]["templates"]
    assert "card" in [template["name"] for template in templates]
    assert run in own("status --cluster", **reach)
    assert own(f"delete {run} --yes", **reach) == f"deleted {run}\n"
    assert not cluster.objects[f"{ARGO}/workflows"]


def test_the_check_of_a_namespace_takes_the_config(own: Own, tmp_path: Path) -> None:
    with HealthyCluster(tmp_path) as sound:
        out = own(f"platform check {CONFIG} --set cluster.image=r/own:1 --wait 5", KUBECONFIG=str(sound.kubeconfig))
    assert "image r/own:1" in out


@pytest.mark.slow
def test_the_demo_shows_the_same_in_every_folder(own: Own) -> None:
    out = own("demo chaos --workers 1 --steps 20 --seconds-between 100")
    assert "EQUAL" in out


@pytest.mark.slow
@pytest.mark.timeout(900)  # two whole runs
def test_an_earlier_release_answers_again(own: Own) -> None:
    name = f"shop-{uuid.uuid4().hex[:6]}"
    typed = Shell(own.typed.folder, own.typed.environment | {"REKINDLE_NAME": name})
    released = []
    for seed in (1, 2):
        done = typed(f"rekindle run {CONFIG} --set train.seed={seed} --set gate.tolerance=1000 -o json")
        assert done.returncode == 0, done.stderr
        released.append(json.loads(done.stdout))
    first, second = (run["model_sha256"] for run in released)
    endpoint = released[1]["endpoint"]
    assert first != second and served(endpoint) == second
    back = typed(f"rekindle rollback {name}")
    assert back.returncode == 0, back.stderr
    assert served(endpoint) == first
    assert f"stopped deployment {name}-" in typed("rekindle down").stdout


def served(endpoint: str) -> str:
    """The sha256 of the model that answers."""
    with urllib.request.urlopen(f"{endpoint}/health/ready") as answer:
        return json.load(answer)["sha256"]
