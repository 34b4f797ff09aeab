"""However a workflow ends, no training is left behind that nobody waits for."""

from tests.cluster.run import Place, Run, rekindle
from tests.waiting import until

SHORT = ["name=endings", "data.source=simulate://7?cards=150&terminals=300&days=70", "gate.minimum={auc: 0.01}"]


def _left(run: Run) -> list[str]:
    """Jobs and live pods of training that are still there."""
    jobs = run.place.kube.items("pytorchjobs", f"workflows.argoproj.io/workflow={run.name}")
    pods = run.place.kube.items("pods", f"training.kubeflow.org/job-name={run.name}-train")
    return [resource["metadata"]["name"] for resource in [*jobs, *pods]]


def test_a_stopped_run_leaves_no_job_behind(place: Place):
    run = Run.submit(place, *SHORT, "train.steps=100000")
    run.trains(10, 400)
    rekindle("stop", run.name, "--cluster", "--namespace", place.kube.namespace)
    assert run.ended(120).startswith("Failed")
    until("the job and its pods are gone", lambda: not _left(run), 60)


def test_a_job_that_trains_too_long_ends_at_its_deadline(place: Place):
    short = "cluster.pods.train={cpu: 50m, memory: 1Gi, deadline_minutes: 1}"
    run = Run.submit(place, *SHORT, "train.steps=10000000", short)
    assert run.ended(600).startswith("Failed")
    (train,) = run.nodes("train")
    assert "failure condition" in train["message"]
    until("the job and its pods are gone", lambda: not _left(run), 60)
