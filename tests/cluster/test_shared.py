"""Trainings on a shared cluster: in a queue, and with extra workers on idle quota.

Needs Kueue on the cluster.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rekindle.training.ledger.ledger_summary import Incident
from tests.cluster.kube import Kube, Object
from tests.cluster.quota import (
    KUEUE_API,
    LIGHT_SETTINGS,
    OTHER_JOB,
    create_queue,
    make_other_job,
    queue_settings,
)
from tests.cluster.run import (
    Namespace,
    Run,
    cluster_sha256s,
    is_served,
    local_sha256s,
    rekindle,
    run_locally,
)
from tests.commands import BIN, ROOT
from tests.faults.matrix import PACE_SETTING, SETTINGS, TOLERATED_STEPS
from tests.waiting import until

PAGE = ROOT / "docs/shared-clusters.md"
CONFIG = ROOT / "configs/digits.yaml"
SWEEP = ROOT / "configs/sweep.yaml"
BEST_SETTING = "cluster.pods.best={cpu: 50m, memory: 1Gi}"
STEPS = 2000
SHORT_SETTINGS = [*SETTINGS, PACE_SETTING, f"train.steps={STEPS}", "train.workers=2"]


@pytest.fixture(scope="module")
def expected(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the model of SHORT_SETTINGS with one worker on this machine."""
    return run_locally(
        tmp_path_factory.mktemp("short"),
        *namespace.sets([*SHORT_SETTINGS, "train.workers=1", "model.micro_batch_seconds=0"]),
        config=CONFIG,
    )["model_sha256"]


def list_drains(run: Run) -> list[Incident]:
    """Return the incidents of workers that left in order, oldest first."""
    return sorted(
        (i for i in run.summary().incidents if i.kind == "drain"), key=lambda incident: incident.t
    )


def page_objects(namespace: str, cpu: str) -> list[Object]:
    """Return the objects of docs/shared-clusters.md for this namespace, with names that no other
    test uses, and with a quota of `cpu` that borrows nothing."""
    (text,) = [
        block
        for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "kind: ClusterQueue" in block
    ]
    names = (
        "default-nodes|company|production|research|kueue-quotas|kueue-configuration|high|low|idle"
    )
    text = re.sub(rf"(?<=[ :])({names})(?=[,}} \n])", rf"{namespace}-\1", text)
    text = re.sub(r"\bmodels\b", namespace, text)
    text = text.replace(
        'nominalQuota: "32", borrowingLimit: "32"', f'nominalQuota: {cpu}, borrowingLimit: "0"'
    )
    return list(yaml.safe_load_all(text))


@pytest.fixture
def page_queue(namespace: Namespace) -> Iterator[str]:
    """The prefix of the names of the page's objects, whose queue has a quota of 100m CPU: two pods
    of 50m."""
    if not is_served("clusterqueues.kueue.x-k8s.io"):
        pytest.skip("Kueue is not installed")

    name = namespace.kube.namespace
    objects = page_objects(name, "100m")
    for obj in objects:
        Kube(obj["metadata"].get("namespace", name)).apply(obj)
    until("the page's queue is active", lambda: is_active(namespace, f"{name}-research"), 60)
    yield name

    for obj in reversed(objects):
        place = obj["metadata"].get("namespace", name)
        command = ["delete", obj["kind"], obj["metadata"]["name"]]
        # the next test creates objects of the same names
        Kube(place)(*command, "--ignore-not-found", "--timeout=60s")


def is_active(namespace: Namespace, name: str) -> bool:
    queue = namespace.kube.get(f"clusterqueues.{KUEUE_API.partition('/')[0]}", name) or {}
    conditions = (queue.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Active" and each["status"] == "True" for each in conditions)


def page_queue_settings(prefix: str, priority: str) -> list[str]:
    return [
        "cluster.gang=kueue",
        f"cluster.queue={prefix}-research",
        f"cluster.queue_priority={prefix}-{priority}",
        *LIGHT_SETTINGS,
    ]


@pytest.fixture
def queue(namespace: Namespace) -> Iterator[str]:
    """A queue with quota for a job with one worker and two extra workers: four pods of 50m."""
    if not is_served("clusterqueues.kueue.x-k8s.io"):
        pytest.skip("Kueue is not installed")
    with create_queue(namespace, "200m") as queue:
        yield queue


def test_extra_workers_use_and_return_idle_quota_without_changing_the_weights(
    namespace: Namespace, queue: str, expected: str
):
    harvest = [
        "train.min_workers=1",
        "train.max_workers=4",
        "cluster.harvest=true",
    ]

    harvest += [*queue_settings(queue, "normal"), f"cluster.harvest_priority={queue}-idle"]
    harvest += ["name=harvest"]
    run = Run.submit(namespace, *SHORT_SETTINGS, *harvest, config=CONFIG)
    # 50m each for the coordinator, its worker, and two extra workers
    run.wait_for_workers(3, 400)
    assert len(run.running_pods("worker")) == 1
    assert len(run.running_pods("harvest")) == 2
    job = namespace.kube.get("pytorchjob", f"{run.name}-train")
    assert job

    competing_job = make_other_job(namespace, queue, "50m")
    earlier_count = len(list_drains(run))
    namespace.kube.apply(competing_job)
    run.wait_for_workers(2, 120)
    namespace.kube("delete", "job", OTHER_JOB, "--cascade=foreground")
    run.wait_for_workers(3, 120)

    flags = ["-n", namespace.kube.namespace, "-o", "json"]
    subprocess.run(
        [BIN / "rekindle", "scale", run.name, "1", "--cluster", *flags], check=True, cwd=ROOT
    )
    run.wait_for_workers(1, 120)
    subprocess.run(
        [BIN / "rekindle", "scale", run.name, "4", "--cluster", *flags], check=True, cwd=ROOT
    )
    run.wait_for_workers(3, 120)

    assert run.wait_for_end() == "Succeeded"
    assert run.outputs()["model_sha256"] == run.sha256() == expected
    drained = list_drains(run)[earlier_count:]
    assert len(drained) >= 3
    assert sum(i.repeated for i in drained) == 0
    job_afterwards = namespace.kube.get("pytorchjob", f"{run.name}-train")
    assert job_afterwards
    assert job_afterwards["metadata"]["uid"] == job["metadata"]["uid"]
    ended = until("the extra workers have ended", lambda: not run.running_pods("harvest"), 60)
    assert ended
    assert namespace.kube.get("deployment", f"{run.name}-train") is None


def test_a_preempted_job_waits_and_continues(namespace: Namespace, queue: str, expected: str):
    sets = [*queue_settings(queue, "idle"), "name=preempt"]
    run = Run.submit(namespace, *SHORT_SETTINGS, *sets, config=CONFIG)
    run.wait_for_workers(2, 400)
    longest_intervals = list[int]()

    for _ in range(3):
        step = run.wait_for_progress(50)
        durable_steps = [int(event["step"]) for event in run.summary().checkpoints]
        longest_intervals.append(step - max(durable_steps, default=0))
        competing_job = make_other_job(namespace, queue, "150m")
        namespace.kube.apply(competing_job)
        until("the training is suspended", lambda: not run.running_pods("worker"), 90)
        until("status shows the queue", lambda: "waits in the queue" in read_status(run), 60)
        namespace.kube("delete", "job", OTHER_JOB, "--cascade=foreground")
        run.wait_for_step(step + 1, 200)

    assert run.wait_for_end() == "Succeeded"
    assert run.outputs()["model_sha256"] == run.sha256() == expected
    summary = run.summary()
    # the coordinator and all workers end at once, so only the durable checkpoint is left
    assert summary.repeated <= sum(longest_intervals) + 3 * TOLERATED_STEPS
    assert summary.queued_seconds > 0


def read_status(run: Run) -> str:
    """Return the output of `rekindle status NAME --cluster -o json`."""
    flags = ["--cluster", "--namespace", run.namespace.kube.namespace, "-o", "json"]
    return rekindle("status", run.name, *flags, variables=run.namespace.variables)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["cluster.pods.train.cpu=7"], "exceeds the quota of the ClusterQueue"),
        (["cluster.queue=nowhere"], "the LocalQueue nowhere does not exist in namespace"),
        (["cluster.queue_priority=none"], "the WorkloadPriorityClass none does not exist"),
    ],
)
def test_what_kueue_can_never_admit_is_refused_and_creates_nothing(
    namespace: Namespace, page_queue: str, settings: list[str], sentence: str
):
    flags = ["--namespace", namespace.kube.namespace, "--no-cache", "--yes"]
    sets = namespace.sets(
        [*SHORT_SETTINGS, *page_queue_settings(page_queue, "high"), "name=refused", *settings]
    )
    done = subprocess.run(
        [BIN / "rekindle", "submit", CONFIG, *flags, *sets],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count(sentence) == 1, done.stderr
    names = [item["metadata"]["name"] for item in namespace.kube.items("workflows")]
    assert not [name for name in names if name.startswith("refused-")]


def test_a_training_of_higher_priority_is_admitted_before_the_trials_of_a_sweep(
    namespace: Namespace, page_queue: str, tmp_path: Path
):
    quick = ["sweep.trials=8", "sweep.parallel=8", "sweep.lag=8", "train.epochs=6"]
    quick += ["gate.minimum={accuracy: 0.3}", *LIGHT_SETTINGS, BEST_SETTING]
    low = page_queue_settings(page_queue, "low")
    sweep = Run.submit(namespace, *quick, *low, "name=sweep", config=SWEEP)

    def running_trials() -> list[str]:
        """Return the nodes of trials whose pod runs."""
        return [node["displayName"] for node in sweep.nodes("trial") if node["phase"] == "Running"]

    until("two trials run", lambda: len(running_trials()) == 2, 300)
    high = page_queue_settings(page_queue, "high")
    training = Run.submit(
        namespace,
        *SHORT_SETTINGS,
        *high,
        "name=urgent",
        "train.workers=1",
        "train.steps=200",
        config=CONFIG,
    )
    training.wait_for_workers(1, 400)
    assert running_trials() == [], "the training has the whole quota"
    assert sweep.workflow()["status"]["phase"] == "Running"

    assert training.wait_for_end() == "Succeeded"
    assert sweep.wait_for_end(1800) == "Succeeded"
    assert cluster_sha256s(sweep, ("best",)) == local_sha256s(
        namespace, tmp_path / "home", SWEEP, quick, ("best",)
    )
    # each trial that was preempted has a further pod
    assert len(sweep.pods("trial")) > 8
