"""Nodes are drained one server at a time."""

from pipelines.blocks.deployment import labels
from pipelines.blocks.pod import Manifest


def disruption_budget(name: str) -> Manifest:
    """At most one pod is away on purpose; never none, which would block a drain. Source: policy/v1."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": labels(name)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(name)}},
    }
