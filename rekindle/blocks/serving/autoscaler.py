"""How many pods serve: the autoscaler owns the `replicas` of the Deployment that gets the traffic."""

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels
from rekindle.serving.config import ServeConfig


def autoscaler(name: str, serve: ServeConfig, server: str) -> Manifest:
    """More pods while they use more than `cpu_percent` of the CPU they asked for. Source: autoscaling/v2 HPA."""
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": serve.cpu_percent}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": server},
            "minReplicas": serve.min_replicas,
            "maxReplicas": serve.max_replicas,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }
