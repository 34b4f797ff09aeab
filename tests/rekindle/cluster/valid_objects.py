"""Valid objects of the API server, by the plural of their kind."""

from typing import Any

from rekindle.kubernetes_names import NAME_LABEL, PART_OF_REKINDLE
from rekindle.training.cost.prices import PRICES_ANNOTATION

CREATION_TIME = "2026-11-21T20:00:00Z"
METADATA = {
    "uid": "1",
    "namespace": "models",
    "resourceVersion": "100",
    "creationTimestamp": CREATION_TIME,
    "labels": {**PART_OF_REKINDLE, NAME_LABEL: "demo"},
    "annotations": {"a": "b"},
    "ownerReferences": [{"kind": "PyTorchJob", "name": "demo-4k2xp-train"}],
}
CONTAINER = {
    "name": "main",
    "image": "ghcr.io/x/rekindle:v1.9.0",
    "command": ["python", "-m", "rekindle", "step"],
    "args": ["steps.prepare"],
    "env": [{"name": "PET_NPROC_PER_NODE", "value": "1"}],
    "resources": {"limits": {"cpu": "1"}, "requests": {"memory": "1Gi"}},
}
SELECTION = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "value": "yes"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
                ]
            }
        }
    },
}
NODE = {
    "id": "demo-4k2xp-1",
    "name": "demo-4k2xp.prepare",
    "displayName": "prepare",
    "type": "Pod",
    "phase": "Running",
    "templateName": "prepare",
    "templateScope": "local/demo",
    "boundaryID": "demo-4k2xp",
    "startedAt": CREATION_TIME,
    "finishedAt": None,
    "message": "",
    "progress": "0/1",
    "children": ["demo-4k2xp-2"],
    "outboundNodes": ["demo-4k2xp-2"],
    "inputs": {"parameters": [{"name": "server", "value": "demo-1"}]},
    "outputs": {
        "parameters": [{"name": "warnings", "value": "[]", "valueFrom": {"default": "x"}}],
        "artifacts": [{"name": "report", "s3": {"key": "demo-4k2xp/prepare/report"}}],
        "exitCode": "0",
    },
}
TEMPLATES = [
    {"name": "prepare", "container": CONTAINER, "inputs": {"parameters": [{"name": "server"}]}},
    {"name": "main", "dag": {"tasks": [{"name": "prepare", "template": "prepare"}]}, **SELECTION},
    {"name": "job", "resource": {"action": "apply", "manifest": "kind: PyTorchJob"}},
]
SPEC = {
    "entrypoint": "main",
    "arguments": {
        "parameters": [
            {"name": "config", "value": "{}"},
            {"name": "cached", "value": '{"prepare": {"task": "prepare", "at": "demo-1/prepare"}}'},
        ]
    },
    "templates": TEMPLATES,
}
WORKFLOW: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo-4k2xp"},
    "spec": SPEC,
    "status": {
        "phase": "Running",
        "message": "",
        "startedAt": CREATION_TIME,
        "finishedAt": None,
        "nodes": {"demo-4k2xp-1": NODE},
        "conditions": [{"type": "PodRunning", "status": "True"}],
        "outputs": {"parameters": [{"name": "verdict", "value": "release"}]},
        "storedWorkflowTemplateSpec": SPEC,
        "storedTemplates": {"namespaced/demo/prepare": TEMPLATES[0]},
        "taskResultsCompletionStatus": {"demo-4k2xp-1": True},
    },
}
POD: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo-4k2xp-prepare-1"},
    "spec": {"nodeName": "n1", "containers": [CONTAINER], **SELECTION},
    "status": {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "reason": "x", "message": "y"}],
        "containerStatuses": [
            {"name": "main", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}
        ],
    },
}
CRON: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo"},
    "spec": {
        "schedules": ["0 3 * * 1"],
        "timezone": "UTC",
        "suspend": False,
        "workflowSpec": SPEC,
        "workflowMetadata": {"annotations": {PRICES_ANNOTATION: "{}"}},
    },
    "status": {"lastScheduledTime": CREATION_TIME, "active": []},
}
DEPLOYMENT: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo-1"},
    "spec": {"replicas": 1, "template": {"spec": {"containers": [CONTAINER]}}},
    "status": {"observedGeneration": 1, "readyReplicas": 1},
}
CLUSTER_NODE: dict[str, Any] = {
    "metadata": {**METADATA, "name": "n1"},
    "spec": {
        "unschedulable": False,
        "taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}],
    },
    "status": {"allocatable": {"cpu": "4", "memory": "8Gi"}},
}
QUOTA: dict[str, Any] = {
    "metadata": {**METADATA, "name": "quota"},
    "spec": {"hard": {"requests.cpu": "4"}},
    "status": {"hard": {"requests.cpu": "4"}, "used": {"requests.cpu": 1}},
}
EVENT: dict[str, Any] = {
    "metadata": {**METADATA, "name": "e1"},
    "reason": "FailedCreate",
    "message": "exceeded quota",
    "lastTimestamp": CREATION_TIME,
    "involvedObject": {"name": "demo-4k2xp-prepare"},
}
PRICES: dict[str, Any] = {
    "currency": "EUR",
    "default": "cpu",
    "spot": [{"labels": {"spot": "yes"}}],
    "classes": {
        "cpu": {
            "selector": {"resource": "gpu/gpu"},
            "on_demand": {"cpu_hour": 1, "gib_hour": 0.1, "gpu_hour": 2},
        }
    },
}
SERVICE: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo"},
    "spec": {"selector": {"app.kubernetes.io/instance": "demo-2"}, "ports": [{"port": 80}]},
}
AUTOSCALER: dict[str, Any] = {
    "metadata": {**METADATA, "name": "demo"},
    "spec": {
        "minReplicas": 1,
        "maxReplicas": 3,
        "scaleTargetRef": {"kind": "Deployment", "name": "demo-2"},
    },
}
