"""A queue of Kueue with a small quota, and a job of another team that competes for it.

with create_queue(namespace, cpu="200m") as queue:
    Run.submit(namespace, *queue_settings(queue, "normal"))
    namespace.kube.apply(make_other_job(namespace, queue, cpu="50m"))
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.kube import Object
from tests.cluster.run import Namespace

KUEUE_API = "kueue.x-k8s.io/v1beta2"
LOCAL_QUEUE = "train"
# name of the job of the other team
OTHER_JOB = "other"
# small requests for the pods of other steps, so that they fit into a small quota
LIGHT_SETTINGS = ["cluster.pods.champion={cpu: 50m, memory: 1Gi}"]


def queue_settings(queue: str, priority: str) -> list[str]:
    """Return the settings of a run in the queue, with the priority `idle` or `normal`."""
    return [
        "cluster.gang=kueue",
        f"cluster.queue={LOCAL_QUEUE}",
        f"cluster.queue_priority={queue}-{priority}",
        *LIGHT_SETTINGS,
    ]


@contextmanager
def create_queue(namespace: Namespace, cpu: str) -> Iterator[str]:
    """Create a queue with this quota; yield the prefix of the names of its priority classes. A pod
    of a training requests 50m CPU."""
    name = namespace.kube.namespace
    quota = {"cpu": cpu, "memory": "512Gi", "ephemeral-storage": "1000Gi"}

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
                        "coveredResources": list(quota),
                        "flavors": [
                            {
                                "name": name,
                                "resources": [
                                    {"name": key, "nominalQuota": value}
                                    for key, value in quota.items()
                                ],
                            }
                        ],
                    }
                ],
            },
        },
        {
            "kind": "LocalQueue",
            "metadata": {"name": LOCAL_QUEUE, "namespace": name},
            "spec": {"clusterQueue": name},
        },
        *(
            {
                "kind": "WorkloadPriorityClass",
                "metadata": {"name": f"{name}-{label}"},
                "value": value,
            }
            for label, value in (("idle", 1), ("normal", 100))
        ),
    ]

    namespace.kube.apply(*({"apiVersion": KUEUE_API} | obj for obj in objects))
    try:
        yield name
    finally:
        for obj in reversed(objects):
            namespace.kube(
                "delete",
                obj["kind"],
                obj["metadata"]["name"],
                "--ignore-not-found",
                "--wait=false",
            )


def make_other_job(namespace: Namespace, queue: str, cpu: str) -> Object:
    """Return a job of another team, with a higher priority than extra workers."""
    labels = {
        "kueue.x-k8s.io/queue-name": LOCAL_QUEUE,
        "kueue.x-k8s.io/priority-class": f"{queue}-normal",
    }
    resources = {"requests": {"cpu": cpu, "memory": "64Mi", "ephemeral-storage": "1Mi"}}
    container = {
        "name": "other",
        "image": namespace.image,
        "command": ["sleep", "600"],
        "resources": resources,
    }

    security = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }

    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    spec = {"restartPolicy": "Never", "containers": [container], "securityContext": security}

    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": OTHER_JOB, "labels": labels},
        "spec": {
            "suspend": True,
            "template": {"spec": spec | {"terminationGracePeriodSeconds": 1}},
        },
    }
