"""Tests of a training program on a cluster: a lost pod costs the steps since the last save."""

from pathlib import Path

import pytest

from tests.cluster.run import Namespace, Run, is_served
from tests.waiting import until

JOB_SETS = "jobsets.jobset.x-k8s.io"
STEPS = 3000
CONFIG = f"""
name: linear
workload: tests.programs.linear
data: {{}}
program:
  command: [tests/programs/ddp.py, --checkpoint-dir, "{{checkpoints}}", --steps, "{STEPS}"]
  result: "{{checkpoints}}/final.pt"
train: {{workers: 3, min_workers: 2}}
gate: {{maximum: {{error: 10}}}}
"""


@pytest.mark.parametrize("backend", ["pytorchjob", "jobset"])
def test_a_program_survives_a_pod_that_is_deleted_by_force(
    namespace: Namespace, backend: str, tmp_path: Path
) -> None:
    if backend == "jobset" and not is_served(JOB_SETS):
        pytest.skip(f"the cluster does not serve {JOB_SETS}")

    config = tmp_path / "linear.yaml"
    config.write_text(CONFIG)
    run = Run.submit(
        namespace, f"cluster.backend={backend}", f"name=linear-{backend[:3]}", config=config
    )

    def has_saved() -> bool:
        return len(run.running_pods("worker")) == 3 and run.step() >= 10

    until("the program has saved on three pods", has_saved, 400, pause=1)
    namespace.kube.delete_pods(run.running_pods("worker")[-1], force=True)

    assert run.wait_for_end() == "Succeeded"
    events = {event["event"]: event for event in run.events()}
    assert events.keys() >= {"restored", "complete"}
    assert events.keys() & {"lost", "drain"}
    assert events["restored"]["step"] >= 10
    assert run.outputs()["model_sha256"] == run.sha256()
