"""Make workflows, their nodes and queued workloads, as a cluster reports them."""

from typing import Any

WORKFLOWS_AT = "/apis/argoproj.io/v1alpha1/namespaces/models/workflows"


def make_workflow(name: str, phase: str = "Running") -> dict[str, Any]:
    return {"kind": "Workflow", "metadata": {"name": name}, "spec": {}, "status": {"phase": phase}}


def make_manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "demo-", "namespace": "ours"},
        "spec": {
            "entrypoint": "main",
            "arguments": {"parameters": [{"name": "n", "value": 1}]},
            **spec,
        },
    }


def make_node(
    name: str,
    kind: str = "Pod",
    phase: str = "Succeeded",
    children: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    return {
        "id": name,
        "name": name,
        "type": kind,
        "phase": phase,
        "children": list(children),
        "startedAt": "2026-11-21T20:00:00Z",
        "finishedAt": "2026-11-21T20:01:00Z",
        **more,
    }


WORKLOADS = "/apis/kueue.x-k8s.io/{}/namespaces/models/workloads"
REASON = (
    "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor default"
)


def make_kueue_workload(
    owner: str, start_second: int, kind: str = "PyTorchJob", priority: int = 0, **conditions: str
) -> dict[str, Any]:
    states = [
        {"type": name, "status": status, "message": REASON} for name, status in conditions.items()
    ]
    references = [{"kind": kind, "name": owner}]
    creation_time = f"2026-11-23T10:00:{start_second:02}Z"
    metadata = {
        "name": f"{kind.lower()}-{owner}",
        "creationTimestamp": creation_time,
        "ownerReferences": references,
    }
    spec = {"queueName": "train", "priority": priority}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": states}}
