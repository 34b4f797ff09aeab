"""The autoscaler, which sets `replicas` of the Deployment that gets the traffic."""

from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.serving.model_deployment import labels
from rekindle.release.serve_config import ServeConfig


def build_autoscaler(autoscaler_name: str, serve_config: ServeConfig, server_name: str) -> Manifest:
    """Return an autoscaler that scales up immediately if any metric is above its target, and scales
    down by one pod per minute.

    Source: the fields are defined by Kubernetes (autoscaling/v2, HorizontalPodAutoscaler).
    """
    metric_specs = [_utilization_metric("cpu", serve_config.cpu_percent)]
    if serve_config.memory_percent:
        metric_specs.append(_utilization_metric("memory", serve_config.memory_percent))

    for metric_name, average_value in sorted(serve_config.metrics.items()):
        metric_target = {"type": "AverageValue", "averageValue": average_value}
        metric_specs.append(
            {"type": "Pods", "pods": {"metric": {"name": metric_name}, "target": metric_target}}
        )

    one_pod_per_minute = {"type": "Pods", "value": 1, "periodSeconds": 60}

    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": autoscaler_name, "labels": labels(autoscaler_name)},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": server_name},
            "minReplicas": serve_config.min_replicas,
            "maxReplicas": serve_config.max_replicas,
            "metrics": metric_specs,
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": serve_config.scale_down_seconds,
                    "policies": [one_pod_per_minute],
                }
            },
        },
    }


def _utilization_metric(resource_name: str, percent: int) -> Manifest:
    metric_target = {"type": "Utilization", "averageUtilization": percent}
    return {"type": "Resource", "resource": {"name": resource_name, "target": metric_target}}
