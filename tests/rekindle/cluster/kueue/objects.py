"""Objects of Kueue with one queue that has quota for every job of a test; each test changes one of
these objects."""

from typing import Any

import yaml

from tests.rekindle.cluster.server import ApiServer

API = "/apis/kueue.x-k8s.io/v1beta2"
QUEUES = f"{API}/namespaces/models/localqueues"
FRAMEWORKS = [
    "pod",
    "deployment",
    "kubeflow.org/pytorchjob",
    "jobset.x-k8s.io/jobset",
    "trainer.kubeflow.org/trainjob",
]
ROOM = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "500Gi", "nvidia.com/gpu": "8"}


def flavor_quota(name: str, amounts: dict[str, str], **limits: str) -> dict[str, Any]:
    resources = [
        {"name": resource, "nominalQuota": amount, **limits} for resource, amount in amounts.items()
    ]
    return {"name": name, "resources": resources}


def cluster_queue(name: str, *flavors: dict[str, Any], **spec: Any) -> dict[str, Any]:
    groups = [
        {
            "coveredResources": [resource["name"] for resource in flavors[0]["resources"]],
            "flavors": [*flavors],
        }
    ]
    return {
        "metadata": {"name": name},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": groups,
            **spec,
        },
        "status": {"conditions": [{"type": "Active", "status": "True"}]},
    }


def put_cluster_objects(server: ApiServer, plural: str, *objects: dict[str, Any]) -> None:
    """Replace all objects of a cluster-wide kind."""
    server.fixed[f"{API}/{plural}"] = {"items": [*objects], "metadata": {}}


def configure_kueue(server: ApiServer, **configuration: Any) -> None:
    """Replace Kueue's configuration."""
    document = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "integrations": {"frameworks": FRAMEWORKS},
        **configuration,
    }
    server.put(
        "/api/v1/namespaces/kueue-system/configmaps",
        {
            "metadata": {"name": "kueue-manager-config"},
            "data": {"controller_manager_config.yaml": yaml.safe_dump(document)},
        },
    )


def install_kueue(server: ApiServer) -> None:
    """Install Kueue with the LocalQueue `research` of the namespace `models`."""
    configure_kueue(server)
    server.put(QUEUES, {"metadata": {"name": "research"}, "spec": {"clusterQueue": "shared"}})
    put_cluster_objects(
        server, "clusterqueues", cluster_queue("shared", flavor_quota("default", ROOM))
    )
    put_cluster_objects(server, "cohorts")
    put_cluster_objects(server, "resourceflavors", {"metadata": {"name": "default"}, "spec": {}})
    put_cluster_objects(
        server,
        "workloadpriorityclasses",
        {"metadata": {"name": "high"}},
        {"metadata": {"name": "low"}},
    )
    labels = {"team": "vision"}
    server.fixed["/api/v1/namespaces/models"] = {"metadata": {"name": "models", "labels": labels}}
