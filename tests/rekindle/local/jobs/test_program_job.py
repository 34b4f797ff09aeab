"""Tests of a training program in jobs of other frameworks, as real processes: a lost pod costs the
work since the newest checkpoint, and the ledger records this loss."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.jobs.program_job import ProgramJob
from rekindle.blocks.settings import ClusterConfig
from rekindle.kubernetes_names import PROGRAM_IN_JOB_MODULES, REKINDLE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.training_job import TrainingJobs, find_condition
from rekindle.program.spec import ProgramSpec
from rekindle.storage import Store
from rekindle.training.cost.bill import build_report
from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.events import read_events
from rekindle.training.spec import TrainConfig
from tests.commands import ROOT, open_shell
from tests.polling import wait

pytestmark = pytest.mark.timeout(120)
SUMS = "tests/programs/sums.py"


@dataclass
class Run:
    """A job that runs a program."""

    jobs: TrainingJobs
    store: Store
    prefix: str

    def wait_for(self, holds: Callable[[], Any]) -> None:
        try:
            wait(self.jobs, lambda _: holds())
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def wait_for_end(self) -> dict[str, Any]:
        self.wait_for(lambda: self.ended("Succeeded") or self.ended("Failed"))
        return (self.jobs.get("job") or {})["status"]

    def ended(self, kind: str) -> bool:
        return bool(find_condition((self.jobs.get("job") or {}).get("status") or {}, kind))

    def wait_for_step(self, step: int) -> None:
        """Wait until the checkpoint of a step is in the object store, and until no pod deletes
        older checkpoints, because the other pods would wait for the deletion by a killed pod."""
        self.wait_for(lambda: self.has_stored(step) and not self.list_objects("deletions"))

    def has_stored(self, step: int) -> bool:
        keys = self.list_objects("checkpoints")
        return any(f"step-{step}" in self.store.get(key).decode() for key in keys)

    def list_objects(self, kind: str) -> list[str]:
        prefix = f"{self.prefix}/checkpoints/program/{kind}/"
        return [entry.key for entry in self.store.list(prefix)]

    def signal(self, pod: str, signal_number: signal.Signals) -> None:
        process = self.jobs.jobs["job"].pods[pod].process
        assert process
        os.kill(process.pid, signal_number)

    def logs(self) -> str:
        files = sorted((self.jobs.run / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in files)

    def result(self) -> dict[str, Any]:
        return json.loads(self.store.get(f"{self.prefix}/model/result/final.json"))

    def summary(self) -> Any:
        return summarize_events(read_events(self.store, f"{self.prefix}/checkpoints/ledger"))


@pytest.fixture
def start(
    tmp_path: Path, s3: Store, s3_environment: dict[str, str]
) -> Iterator[Callable[..., Run]]:
    """Return a function that starts a job of the given kind with a program."""
    cluster = LocalCluster(tmp_path)
    controllers = cluster.kinds.controllers(cluster, tmp_path / "run")

    def start(kind: str, counts: dict[str, int], command: list[str] | None = None) -> Run:
        config = ClusterConfig.model_validate({"image": "python:3.11-slim"})
        job = ProgramJob(kind, counts, config.pod("train"), {})
        program = {
            "command": command or [SUMS, kind, "{checkpoints}", "{node_rank}"],
            "resume": ["{checkpoint}"],
            "result": "{checkpoints}/final.json",
            "marker": "done",
        }
        prefix = f"runs/{tmp_path.name}"
        flags = {
            "program": json.dumps(program),
            "workload": "tests.rekindle.program.slopes",
            "dataset": "none",
            "digest": "",
            "out": f"{prefix}/model",
            "checkpoints": f"{prefix}/checkpoints",
            **dict.fromkeys(("workers", "min_workers", "max_workers"), job.members),
        }
        args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        ProgramSpec.from_flags(args)
        commands = member_commands(PROGRAM_IN_JOB_MODULES, args)
        obj = job.manifest("job", TrainConfig.model_validate({}), config, commands)

        variables = {
            **s3_environment,
            REKINDLE_SECRET: "0123456789" * 4,
            "REKINDLE_CACHE": str(tmp_path / "cache"),
        }
        for replica in obj["spec"][
            next(key for key in obj["spec"] if "ReplicaSpecs" in key)
        ].values():
            (container,) = replica["template"]["spec"]["containers"]
            container["envFrom"] = []
            container["env"] = [
                *(variable for variable in container["env"] if variable["name"] not in variables),
                *({"name": name, "value": value} for name, value in variables.items()),
            ]

        jobs = controllers[kind]
        assert isinstance(jobs, TrainingJobs)
        jobs.apply(json.loads(json.dumps(obj).replace("{{workflow.name}}", "job")))
        return Run(jobs, s3, prefix)

    yield start
    for jobs in controllers.values():
        jobs.stop(0)


# kind of job → (pods by role, the pod that is killed, and the sum of the ranks' numbers)
CASES = {
    "XGBoostJob": ({"Master": 1, "Worker": 2}, "job-worker-1", 6),
    "TFJob": ({"Chief": 1, "Worker": 1, "PS": 1}, "job-ps-0", 3),
    "JAXJob": ({"Worker": 2}, "job-worker-0", 3),
    "PaddleJob": ({"Worker": 2}, "job-worker-1", 3),
    "MPIJob": ({"Launcher": 1, "Worker": 1}, "job-launcher", 1),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", CASES)
def test_a_killed_pod_costs_only_the_steps_since_the_newest_checkpoint(
    start: Callable[..., Run], kind: str
) -> None:
    counts, pod, total = CASES[kind]
    run = start(kind, counts)
    run.wait_for_step(10)
    run.signal(pod, signal.SIGKILL)
    status = run.wait_for_end()
    assert find_condition(status, "Succeeded"), run.logs()
    assert run.result() == {"total": total}
    assert re.search(r"node 0: rank 0 of \d starts at step 10", run.logs())
    words = "\n".join(build_report(run.summary(), None)["words"])
    assert f"{pod} was lost" in words
    assert re.search(r"step 10 was restored from the (object store|node's disk)", words), words


@pytest.mark.slow
def test_the_leader_may_leave_and_all_pods_continue_with_its_replacement(
    start: Callable[..., Run],
) -> None:
    run = start("JAXJob", {"Worker": 2})
    run.wait_for_step(10)
    run.signal("job-worker-0", signal.SIGTERM)
    status = run.wait_for_end()
    assert find_condition(status, "Succeeded"), run.logs()
    assert run.result() == {"total": 3}
    assert "[job-worker-0] ended with code 143 and is restarted" in run.logs()
    assert "node 0: rank 0 of 2 starts at step 10" in run.logs()


def test_a_program_that_always_fails_fails_the_job_with_its_last_line(
    start: Callable[..., Run],
) -> None:
    run = start("XGBoostJob", {"Master": 1}, ["python", "-c", "raise SystemExit('no rows')"])
    failed = find_condition(run.wait_for_end(), "Failed")
    assert failed, run.logs()
    assert (
        "(3 times without a newer step): rank 0 of the program ended with exit code 1: no rows"
        in (failed["message"])
    )
    assert "is restarted" not in run.logs()


PIPELINE = """
from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.job(data, "JAXJob", config.program, {"Worker": 2}, task="fit")
        blocks.evaluate(model)
    return workflow
"""
# process 0 saves checkpoints and the result
SAVE = """
import json, os, pathlib, sys

folder = pathlib.Path(sys.argv[1])
if os.environ["PROCESS_ID"] == "0":
    for step in range(1, 6):
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / "done").touch()
    rows = json.loads(pathlib.Path(sys.argv[2], "test.json").read_text())
    (folder / "final.json").write_text(json.dumps({"slope": rows[1][1] / rows[1][0]}))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_pipeline_evaluates_the_result_and_explains_the_training_with_its_cost(
    tmp_path: Path,
) -> None:
    section = {
        "command": ["train.py", "{checkpoints}", "{dataset}"],
        "result": "{checkpoints}/final.json",
        "marker": "done",
    }
    config = {
        "name": "slopes",
        "pipeline": "pipelines.slopes",
        "workload": "slopes",
        "data": {"source": "simulate://7"},
        "program": section,
        "gate": {"maximum": {"error": 0.1}},
    }
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines/slopes.py").write_text(PIPELINE)
    (tmp_path / "train.py").write_text(SAVE)
    (tmp_path / "slopes.yaml").write_text(json.dumps(config))
    shutil.copy(ROOT / "tests/rekindle/program/slopes.py", tmp_path)
    shutil.copy(ROOT / "template/prices.yaml", tmp_path)

    with open_shell(tmp_path) as typed:
        result = typed("rekindle run slopes.yaml -o json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["verdict"] == "release"

        report = json.loads(typed("rekindle explain -o json").stdout)
    assert report["cost"]["total"] > 0
    assert report["cost"]["total"] == report["run_cost"]["steps"]["fit"]
    assert report["words"][0].startswith("2 workers trained")
    assert "jobs" not in report
