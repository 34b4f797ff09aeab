"""What a shared cluster needs: other kinds of jobs, a queue, workers that take what is idle. Needs JobSet, Kubeflow's
Trainer and Kueue on the cluster; tests of what is not there are skipped.
"""

import subprocess
from collections.abc import Iterator

import pytest

from rekindle.training.ledger.report import Incident
from tests.cluster.kube import Object
from tests.cluster.run import Place, Run, local
from tests.cluster.story import LONG
from tests.commands import BIN, ROOT
from tests.waiting import until

STEPS = 4000
SHORT = [*LONG, f"train.steps={STEPS}", "train.workers=2"]
APIS = {"jobset": "jobsets.jobset.x-k8s.io", "trainjob": "trainjobs.trainer.kubeflow.org"}


def served(api: str) -> bool:
    return subprocess.run(["kubectl", "get", api], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def expected(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of SHORT, by one worker on this machine."""
    return local(tmp_path_factory.mktemp("short"), *place.sets([*SHORT, "train.workers=1"]))["model_sha256"]


def drains(run: Run) -> list[Incident]:
    """Return the workers that left on request, oldest first."""
    return sorted((i for i in run.summary().incidents if i.kind == "drain"), key=lambda incident: incident.t)


def workers_of(run: Run, role: str = "worker") -> list[str]:
    label = f"training.kubeflow.org/job-name={run.name}-train,training.kubeflow.org/replica-type={role}"
    pods = run.place.kube.items("pods", label)
    return sorted(
        pod["metadata"]["name"]
        for pod in pods
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    )


@pytest.mark.parametrize("backend", ["jobset", "restart_job", "trainjob"])
def test_lost_workers_of_every_backend_come_back_and_the_bits_are_those_of_this_machine(
    place: Place, expected: str, backend: str
):
    kind = "jobset" if backend == "restart_job" else backend
    if not served(APIS[kind]):
        pytest.skip(f"no {APIS[kind]} here")
    gate = ["cluster.restart_job=true"] if backend == "restart_job" else []
    run = Run.submit(place, *SHORT, f"cluster.backend={kind}", f"name={backend.replace('_', '')[:8]}", *gate)
    run.whole(2, 400)
    kind_name = {"jobset": "jobset", "trainjob": "trainjob"}[kind]
    job = place.kube.get(kind_name, f"{run.name}-train")
    place.kube.delete_pods(workers_of(run)[0], force=True)
    run.goes_on()
    run.whole(2, 200)
    again = place.kube.get(kind_name, f"{run.name}-train")
    assert job and again and again["metadata"]["uid"] == job["metadata"]["uid"]
    assert run.ended() == "Succeeded"
    assert run.outputs()["model_sha256"] == run.sha256() == expected
    lost = [incident for incident in run.summary().incidents if incident.kind in ("lost", "drain")]
    assert lost and all(incident.repeated == 0 for incident in lost), "the other one went on"


@pytest.fixture
def queue(place: Place) -> Iterator[str]:
    """A queue with room for a job of one worker and two harvested ones."""
    if not served("clusterqueues.kueue.x-k8s.io"):
        pytest.skip("no Kueue here")
    name, api = place.kube.namespace, "kueue.x-k8s.io/v1beta2"
    wanted = {"cpu": "200m", "memory": "512Gi", "ephemeral-storage": "1000Gi"}  # four pods of 50m
    objects: list[Object] = [
        {"kind": "ResourceFlavor", "metadata": {"name": name}},
        {
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {
                        "coveredResources": list(wanted),
                        "flavors": [
                            {
                                "name": name,
                                "resources": [{"name": key, "nominalQuota": value} for key, value in wanted.items()],
                            }
                        ],
                    }
                ],
            },
        },
        {"kind": "LocalQueue", "metadata": {"name": "train", "namespace": name}, "spec": {"clusterQueue": name}},
        *(
            {"kind": "WorkloadPriorityClass", "metadata": {"name": f"{name}-{label}"}, "value": value}
            for label, value in (("idle", 1), ("normal", 100))
        ),
    ]
    place.kube.apply(*({"apiVersion": api} | obj for obj in objects))
    yield name
    for obj in reversed(objects):
        place.kube("delete", obj["kind"], obj["metadata"]["name"], "--ignore-not-found", "--wait=false")


def other_job(queue: str, cpu: str) -> Object:
    """A job of another team, of a higher priority than harvested workers."""
    labels = {"kueue.x-k8s.io/queue-name": "train", "kueue.x-k8s.io/priority-class": f"{queue}-normal"}
    resources = {"requests": {"cpu": cpu, "memory": "64Mi", "ephemeral-storage": "1Mi"}}
    container = {"name": "other", "command": ["sleep", "600"], "resources": resources}
    security = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec = {"restartPolicy": "Never", "containers": [container], "securityContext": security}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "other", "labels": labels},
        "spec": {"suspend": True, "template": {"spec": spec | {"terminationGracePeriodSeconds": 1}}},
    }


def test_idle_quota_is_harvested_and_given_back_and_no_bit_changes(place: Place, queue: str, expected: str):
    harvest = ["train.min_workers=1", "train.max_workers=4", "cluster.harvest=true", "cluster.gang=kueue"]
    harvest += ["cluster.queue=train", f"cluster.queue_priority={queue}-normal"]
    harvest += [f"cluster.harvest_priority={queue}-idle", "name=harvest"]
    run = Run.submit(place, *SHORT, *harvest)
    run.whole(3, 400)  # 50m each for the coordinator, its worker, and the two that there is quota for
    assert (len(workers_of(run)), len(workers_of(run, "harvest"))) == (1, 2)
    job = place.kube.get("pytorchjob", f"{run.name}-train")
    assert job

    other = other_job(queue, "50m")
    other["spec"]["template"]["spec"]["containers"][0]["image"] = place.image
    earlier = len(drains(run))
    place.kube.apply(other)
    run.whole(2, 120)
    place.kube("delete", "job", "other", "--cascade=foreground")
    run.whole(3, 120)

    flags = ["-n", place.kube.namespace, "-o", "json"]
    subprocess.run([BIN / "rekindle", "scale", run.name, "1", "--cluster", *flags], check=True, cwd=ROOT)
    run.whole(1, 120)
    subprocess.run([BIN / "rekindle", "scale", run.name, "4", "--cluster", *flags], check=True, cwd=ROOT)
    run.whole(3, 120)

    assert run.ended() == "Succeeded"
    assert run.outputs()["model_sha256"] == run.sha256() == expected
    drained = drains(run)[earlier:]
    assert len(drained) >= 3 and sum(i.repeated for i in drained) == 0
    again = place.kube.get("pytorchjob", f"{run.name}-train")
    assert again and again["metadata"]["uid"] == job["metadata"]["uid"]
    left = until("the harvested workers are gone", lambda: not workers_of(run, "harvest"), 60)
    assert left and place.kube.get("deployment", f"{run.name}-train") is None


def test_a_job_that_is_preempted_waits_and_goes_on(place: Place, queue: str, expected: str):
    sets = ["cluster.gang=kueue", "cluster.queue=train", f"cluster.queue_priority={queue}-idle", "name=preempt"]
    run = Run.submit(place, *SHORT, *sets, "train.checkpoint_seconds=5")
    run.whole(2, 400)
    for _ in range(3):
        step = run.goes_on(50)
        other = other_job(queue, "150m")
        other["spec"]["template"]["spec"]["containers"][0]["image"] = place.image
        place.kube.apply(other)
        until("the training is suspended", lambda: not workers_of(run), 90)
        place.kube("delete", "job", "other", "--cascade=foreground")
        run.trains(step + 1, 200)
    assert run.ended() == "Succeeded"
    assert run.outputs()["model_sha256"] == run.sha256() == expected
