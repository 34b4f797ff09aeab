"""The autoscaler, which sets `replicas` of the Deployment that gets the traffic."""

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import ServeConfig


def autoscaler(name: str, serve: ServeConfig, server: str) -> Manifest:
    """Return an autoscaler that scales up immediately if any metric is above its target, and scales
    down by one pod per minute.

    Source: autoscaling/v2 HPA.
    """
    metrics = [_utilization("cpu", serve.cpu_percent)]
    if serve.memory_percent:
        metrics.append(_utilization("memory", serve.memory_percent))

    for metric, value in sorted(serve.metrics.items()):
        target = {"type": "AverageValue", "averageValue": value}
        metrics.append({"type": "Pods", "pods": {"metric": {"name": metric}, "target": target}})

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


def _utilization(resource: str, percent: int) -> Manifest:
    target = {"type": "Utilization", "averageUtilization": percent}
    return {"type": "Resource", "resource": {"name": resource, "target": target}}
