"""The jobs of `rekindle render` on 200 nodes: all pods are placed as the config says.

The nodes are fake (fake_nodes.py), and their pods run no container; the cluster has a real
scheduler, real controllers of the jobs and a real Kueue. The tests need the program `kwok` on the PATH, and
the last tests need Kueue.
"""

import json
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import yaml

from argolocal.manifest.object_labels import JOB_NAME_LABEL, REPLICA_TYPE_LABEL
from tests.cluster import fake_nodes
from tests.cluster.fake_nodes import (
    CPUS_PER_NODE,
    FAKE_LABEL,
    HOST_LABEL,
    NODES_PER_RACK,
    RACK_LABEL,
    SPOT_LABEL,
    TOLERATION,
    ZONE_LABEL,
    ZONES,
    FakeNode,
)
from tests.cluster.kube import Kube, Object
from tests.cluster.run import is_served, rekindle
from tests.commands import ROOT
from tests.waiting import until

JOB_OBJECTS = {
    "pytorchjob": ("PyTorchJob",),
    "jobset": ("JobSet",),
    "trainjob": ("TrainingRuntime", "TrainJob"),
}
BACKENDS = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
# a worker that needs most of a node; the coordinators use the rest
WHOLE_NODE_CPUS = CPUS_PER_NODE - 1
PLACEMENT_TIMEOUT_S = 900
KUEUE_API = "kueue.x-k8s.io/v1beta2"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """A namespace, and 200 fake nodes whose label FAKE_LABEL is the name of the namespace."""
    if not fake_nodes.find_kwok():
        pytest.skip("kwok is not on the PATH")

    kube = Kube(f"rekindle-test-{uuid.uuid4().hex[:6]}")
    kube("create", "namespace", kube.namespace)
    try:
        with fake_nodes.start_nodes(kube.namespace, tmp_path_factory.mktemp("kwok")):
            yield kube
            delete_jobs(kube)
    finally:
        kube("delete", "namespace", kube.namespace, "--wait=false")


@pytest.fixture(scope="module")
def nodes(kube: Kube) -> dict[str, FakeNode]:
    return fake_nodes.make_nodes(kube.namespace)


@pytest.fixture(autouse=True)
def without_jobs(kube: Kube) -> Iterator[None]:
    """Delete the jobs of a test at its end."""
    yield
    delete_jobs(kube)


def delete_jobs(kube: Kube) -> None:
    for api in BACKENDS.values():
        if is_served(api):
            kube("delete", api, "--all", "--wait=false", timeout=300)
    if is_served(BACKENDS["trainjob"]):
        kube("delete", "trainingruntimes.trainer.kubeflow.org", "--all", "--wait=false")
    until("no pod is left", lambda: not kube.items("pods"), PLACEMENT_TIMEOUT_S, pause=1)


def make_pod_setting(kube: Kube, pod_kind: str, **fields: Any) -> str:
    """Return the setting of a kind of pods that run on the fake nodes only."""
    node_selector = {FAKE_LABEL: kube.namespace} | fields.pop("node_selector", {})
    pod = {"tolerations": [TOLERATION], "node_selector": node_selector, **fields}
    return f"cluster.pods.{pod_kind}={json.dumps(pod)}"


@cache
def render_job(backend: str, worker_count: int, *settings: str) -> list[str]:
    """Return the objects of a training job, each as YAML, as `rekindle render` writes them."""
    sets = [
        f"cluster.backend={backend}",
        f"train.workers={worker_count}",
        "train.virtual_workers=64",
        *settings,
    ]
    flags = [flag for setting in sets for flag in ("--set", setting)]
    manifest = rekindle("render", str(ROOT / "configs/digits.yaml"), *flags)
    texts = [
        template["resource"]["manifest"]
        for workflow in yaml.safe_load_all(manifest)
        if workflow["kind"] == "Workflow"
        for template in workflow["spec"]["templates"]
        if "manifest" in template.get("resource", {})
    ]
    # other tags are numbers, or arguments of the containers, which do not run
    job_objects = [
        yaml.safe_load(re.sub(r"\{\{(?!workflow\.name\}).*?\}\}", "1", text, flags=re.DOTALL))
        for text in texts
        if any(f'"kind": "{kind}"' in text for kind in JOB_OBJECTS[backend])
    ]
    objects_by_kind = {job_object["kind"]: job_object for job_object in job_objects}
    return [yaml.safe_dump(objects_by_kind[kind]) for kind in JOB_OBJECTS[backend]]


def submit_jobs(
    kube: Kube,
    names: Sequence[str],
    backend: str,
    worker_count: int,
    *settings: str,
    **worker_fields: Any,
) -> None:
    """Create a job for each name, in the way of Argo: with the name of a workflow.
    `worker_fields`: fields of cluster.pods.train."""
    rendered_objects = render_job(
        backend,
        worker_count,
        make_pod_setting(kube, "coordinator"),
        make_pod_setting(kube, "train", **worker_fields),
        *settings,
    )
    # a TrainJob is refused until Trainer has seen its TrainingRuntime
    for text in rendered_objects:
        documents = [text.replace("{{workflow.name}}", name) for name in names]
        until(
            f"{len(names)} objects are created",
            lambda documents=documents: create_missing(kube, documents),
            60,
            pause=1,
        )


def create_missing(kube: Kube, documents: list[str]) -> bool:
    """Create the objects that do not exist; return True if all exist."""
    kube("create", "-f", "-", stdin="---\n".join(documents), timeout=300, check=False)
    objects = [yaml.safe_load(document) for document in documents]
    existing_names = {item["metadata"]["name"] for item in kube.items(objects[0]["kind"])}
    return all(each["metadata"]["name"] in existing_names for each in objects)


class Placement:
    """The pods of the namespace, by job and role."""

    def __init__(self, kube: Kube, nodes: dict[str, FakeNode]) -> None:
        self.pods = [
            pod
            for pod in kube.items("pods", JOB_NAME_LABEL)
            if "deletionTimestamp" not in pod["metadata"]
        ]
        self.nodes = nodes

    def count_pods(self, job: str) -> int:
        return sum(self._job(pod) == job for pod in self.pods)

    def find_nodes(self, job: str, role: str) -> list[FakeNode]:
        """Return the node of each placed pod of this job and role."""
        return [
            self.nodes[pod["spec"]["nodeName"]]
            for pod in self.pods
            if self._job(pod) == job
            and pod["metadata"]["labels"][REPLICA_TYPE_LABEL] == role
            and pod["spec"].get("nodeName")
        ]

    def find_jobs(self, worker_count: int) -> set[str]:
        """Return the jobs that have a placed coordinator and `worker_count` placed workers."""
        placed_roles = defaultdict[str, Counter[str]](Counter)
        for pod in self.pods:
            if pod["spec"].get("nodeName"):
                placed_roles[self._job(pod)][pod["metadata"]["labels"][REPLICA_TYPE_LABEL]] += 1
        return {
            job
            for job, roles in placed_roles.items()
            if roles == {"master": 1, "worker": worker_count}
        }

    @staticmethod
    def _job(pod: Object) -> str:
        """Return the name of the workflow of a pod."""
        return pod["metadata"]["labels"][JOB_NAME_LABEL].removesuffix("-train")


def wait_until_placed(
    kube: Kube, nodes: dict[str, FakeNode], jobs: set[str], worker_count: int
) -> Placement:
    """Wait until exactly these jobs have all their pods on nodes."""

    def look() -> Placement | None:
        placement = Placement(kube, nodes)
        return placement if placement.find_jobs(worker_count) == jobs else None

    def describe() -> Any:
        placement = Placement(kube, nodes)
        return sorted(placement.find_jobs(worker_count) ^ jobs), len(placement.pods)

    return until(
        f"{len(jobs)} jobs are placed", look, PLACEMENT_TIMEOUT_S, pause=1, evidence=describe
    )


def make_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def skip_without(backend: str) -> None:
    if not is_served(BACKENDS[backend]):
        pytest.skip(f"the cluster does not serve {BACKENDS[backend]}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_selectors_spot_nodes_and_zones_of_all_jobs_are_heeded(
    kube: Kube, nodes: dict[str, FakeNode], backend: str
) -> None:
    skip_without(backend)
    fields: dict[str, dict[str, Any]] = {
        "zone": {"node_selector": {ZONE_LABEL: "zone-2"}},
        "rack": {"node_selector": {RACK_LABEL: "rack-1-0"}},
        "spot": {"preemptible": {SPOT_LABEL: "true"}},
        "avoid": {"avoid": {SPOT_LABEL: "true"}},
        "spread": {"spread": [ZONE_LABEL, HOST_LABEL]},
    }
    names = {name: make_names(name, 5) for name in fields}
    for name, worker_fields in fields.items():
        submit_jobs(kube, names[name], backend, 8, **worker_fields)

    jobs = {job for job_names in names.values() for job in job_names}
    placement = wait_until_placed(kube, nodes, jobs, 8)
    for job in names["zone"]:
        assert {node.zone for node in placement.find_nodes(job, "worker")} == {"zone-2"}
    for job in names["rack"]:
        assert {node.rack for node in placement.find_nodes(job, "worker")} == {"rack-1-0"}
    for job in names["spot"]:
        assert all(node.is_spot for node in placement.find_nodes(job, "worker"))
        assert not any(node.is_spot for node in placement.find_nodes(job, "master"))
    for job in names["avoid"]:
        assert not any(node.is_spot for node in placement.find_nodes(job, "worker"))
    for job in names["spread"]:
        workers = placement.find_nodes(job, "worker")
        # the scheduler prefers an equal number in each zone, among other preferences
        zone_counts = Counter(node.zone for node in workers)
        assert len(zone_counts) == ZONES
        assert max(zone_counts.values()) <= 8 // ZONES + 1
        assert len({node.name for node in workers}) == 8


@pytest.fixture
def priorities(kube: Kube) -> Iterator[dict[str, str]]:
    """The names of two PriorityClasses."""
    names = {level: f"{kube.namespace}-{level}" for level in ("low", "high")}
    classes = [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": {"low": 10, "high": 1000}[level],
        }
        for level, name in names.items()
    ]
    kube.apply(*classes)
    yield names
    kube("delete", "priorityclass", *names.values(), "--ignore-not-found")


@pytest.mark.parametrize("backend", ["pytorchjob", "jobset"])
def test_a_job_of_higher_priority_takes_the_nodes_of_workers_and_no_coordinator_is_lost(
    kube: Kube, nodes: dict[str, FakeNode], priorities: dict[str, str], backend: str
) -> None:
    skip_without(backend)
    low = {"cpu": WHOLE_NODE_CPUS, "priority_class": priorities["low"]}
    high = {"cpu": WHOLE_NODE_CPUS, "priority_class": priorities["high"]}
    low_jobs = make_names("low", 10)
    submit_jobs(kube, low_jobs, backend, 20, **low)
    wait_until_placed(kube, nodes, set(low_jobs), 20)  # all 200 nodes are occupied

    submit_jobs(kube, ["high"], backend, 40, **high)
    until(
        "the job of high priority is placed",
        lambda: "high" in Placement(kube, nodes).find_jobs(40),
        PLACEMENT_TIMEOUT_S,
        pause=1,
    )
    placement = Placement(kube, nodes)
    low_workers = [node for job in low_jobs for node in placement.find_nodes(job, "worker")]
    assert len(low_workers) == len(nodes) - 40
    assert all(len(placement.find_nodes(job, "master")) == 1 for job in low_jobs)

    kube("delete", BACKENDS[backend], "--selector", "workflows.argoproj.io/workflow=high")
    wait_until_placed(kube, nodes, set(low_jobs), 20)


@pytest.fixture
def queue(kube: Kube) -> Iterator[str]:
    """A queue of Kueue for all fake nodes that knows their zones and racks."""
    if not is_served("topologies.kueue.x-k8s.io"):
        pytest.skip("Kueue is not installed, or has no topologies")

    name = kube.namespace
    quota = {"cpu": CPUS_PER_NODE * 200, "memory": "12800Gi", "ephemeral-storage": "20000Gi"}
    group = {
        "coveredResources": list(quota),
        "flavors": [
            {
                "name": name,
                "resources": [
                    {"name": resource, "nominalQuota": amount} for resource, amount in quota.items()
                ],
            }
        ],
    }
    levels = [{"nodeLabel": label} for label in (ZONE_LABEL, RACK_LABEL, HOST_LABEL)]
    objects: list[Object] = [
        {"kind": "Topology", "metadata": {"name": name}, "spec": {"levels": levels}},
        {
            "kind": "ResourceFlavor",
            "metadata": {"name": name},
            "spec": {"topologyName": name, "nodeLabels": {FAKE_LABEL: name}},
        },
        {
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [group],
            },
        },
        {"kind": "LocalQueue", "metadata": {"name": "train"}, "spec": {"clusterQueue": name}},
        *(
            {
                "kind": "WorkloadPriorityClass",
                "metadata": {"name": f"{name}-{level}"},
                "value": value,
            }
            for level, value in (("low", 10), ("high", 1000))
        ),
    ]
    kube.apply(*({"apiVersion": KUEUE_API} | queue_object for queue_object in objects))
    yield name
    delete_jobs(kube)
    for queue_object in reversed(objects):
        kube(
            "delete",
            f"{queue_object['kind']}.kueue.x-k8s.io",
            queue_object["metadata"]["name"],
            "--ignore-not-found",
            "--wait=false",
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gang_gets_a_rack_or_no_pod_and_higher_priority_is_admitted_first(
    kube: Kube, nodes: dict[str, FakeNode], queue: str, backend: str
) -> None:
    skip_without(backend)
    settings = ["cluster.gang=kueue", "cluster.queue=train"]
    worker_fields = {"cpu": WHOLE_NODE_CPUS, "annotations": {REQUIRED_TOPOLOGY: RACK_LABEL}}
    low = f"cluster.queue_priority={queue}-low"
    high = f"cluster.queue_priority={queue}-high"
    rack_count = len(nodes) // NODES_PER_RACK
    low_jobs = make_names("low", rack_count + 4)
    submit_jobs(kube, low_jobs, backend, NODES_PER_RACK, *settings, low, **worker_fields)

    def find_placed(count: int) -> Placement | None:
        placement = Placement(kube, nodes)
        return placement if len(placement.find_jobs(NODES_PER_RACK)) == count else None

    def check(placement: Placement) -> set[str]:
        """Check that each job has all its pods in one rack, or no pod; return the placed jobs."""
        placed_jobs = placement.find_jobs(NODES_PER_RACK)
        for job in placed_jobs:
            workers = placement.find_nodes(job, "worker")
            assert len({node.rack for node in workers}) == 1
            assert len({node.name for node in workers}) == NODES_PER_RACK
        assert all(placement.count_pods(job) == 0 for job in {*low_jobs, *high_jobs} - placed_jobs)
        return placed_jobs

    high_jobs: list[str] = []
    placement = until(
        "a job in each rack", lambda: find_placed(rack_count), PLACEMENT_TIMEOUT_S, pause=1
    )
    assert check(placement) <= set(low_jobs)

    high_jobs = make_names("high", 2)
    submit_jobs(kube, high_jobs, backend, NODES_PER_RACK, *settings, high, **worker_fields)

    def find_high() -> Placement | None:
        placement = find_placed(rack_count)
        return (
            placement
            if placement and set(high_jobs) <= placement.find_jobs(NODES_PER_RACK)
            else None
        )

    placement = until("the jobs of high priority", find_high, PLACEMENT_TIMEOUT_S, pause=1)
    assert len(check(placement) & set(low_jobs)) == rack_count - 2
