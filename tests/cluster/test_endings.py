"""A training job is deleted when its workflow ends."""

from tests.cluster.run import SMALL_SETTINGS, Namespace, Run, rekindle
from tests.waiting import until

SHORT_SETTINGS = ["name=endings", *SMALL_SETTINGS]


def _list_remaining_objects(run: Run) -> list[str]:
    """Return the remaining jobs and pods of the training."""
    jobs = run.namespace.kube.items("pytorchjobs", f"workflows.argoproj.io/workflow={run.name}")
    pods = run.namespace.kube.items("pods", f"training.kubeflow.org/job-name={run.name}-train")
    return [resource["metadata"]["name"] for resource in [*jobs, *pods]]


def test_a_stopped_run_leaves_no_job(namespace: Namespace):
    run = Run.submit(namespace, *SHORT_SETTINGS, "train.steps=100000")
    run.wait_for_step(10, 400)
    rekindle("stop", run.name, "--cluster", "--namespace", namespace.kube.namespace)
    assert run.wait_for_end(120).startswith("Failed")
    until("the job and its pods are gone", lambda: not _list_remaining_objects(run), 60)


def test_a_training_job_ends_at_its_deadline(namespace: Namespace):
    short = "cluster.pods.train={cpu: 50m, memory: 1Gi, deadline_minutes: 1}"
    run = Run.submit(namespace, *SHORT_SETTINGS, "train.steps=10000000", short)
    assert run.wait_for_end(600).startswith("Failed")
    (train,) = run.nodes("train")
    assert "failure condition" in train["message"]
    until("the job and its pods are gone", lambda: not _list_remaining_objects(run), 60)
