"""The number of serving pods: the autoscaler owns `replicas` of the Deployment that gets the
traffic."""

from rekindle.blocks.pod import Manifest
from rekindle.blocks.serving.deployment import labels
from rekindle.release.config import ServeConfig


def autoscaler(name: str, serve: ServeConfig, server: str) -> Manifest:
    """Return an autoscaler: scale up immediately if any metric is above its target, scale down one
    pod per minute.

    Source: autoscaling/v2 HPA.
    """
    utilization = {"cpu": serve.cpu_percent} | (
        {"memory": serve.memory_percent} if serve.memory_percent else {}
    )
    resource_targets = [
        (name, {"type": "Utilization", "averageUtilization": percent})
        for name, percent in utilization.items()
    ]
    metrics: list[Manifest] = [
        {"type": "Resource", "resource": {"name": name, "target": target}}
        for name, target in resource_targets
    ]

    metrics += [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": name},
                "target": {"type": "AverageValue", "averageValue": value},
            },
        }
        for name, value in sorted(serve.metrics.items())
    ]

    one_pod_per_minute = {"type": "Pods", "value": 1, "periodSeconds": 60}

    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": server},
            "minReplicas": serve.min_replicas,
            "maxReplicas": serve.max_replicas,
            "metrics": metrics,
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": serve.scale_down_seconds,
                    "policies": [one_pod_per_minute],
                }
            },
        },
    }
