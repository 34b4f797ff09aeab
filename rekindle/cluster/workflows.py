"""Argo's objects in a namespace: begin, look at, stop, go on with, and remove runs; put a schedule in place.

    workflow = submission(manifest, {"message": "hello"}, cluster.namespace)
    submit(cluster, workflow); stop(cluster, name); resume(cluster, name)

All is plain data. A status that Argo compressed is unpacked; one that it keeps in a database has no nodes here.
"""

import base64
import copy
import difflib
import gzip
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.argo import names
from rekindle.argo.kinds import COMPLETED, FAILED
from rekindle.argo.language.gofmt import timestamp
from rekindle.argo.manifest import read as manifests
from rekindle.argo.manifest.retry_workflow import reset
from rekindle.cluster.api import CRONS, PODS, TEMPLATES, WORKFLOWS, Cluster, Object, Resource
from rekindle.cluster.errors import ApiError
from rekindle.common.identity import random_suffix
from rekindle.errors import ConfigError, did_you_mean
from rekindle.provenance import PROVENANCE
from rekindle.render import manifest_sha256, ordered

SHA256 = "rekindle.dev/manifest-sha256"
SUBMISSION = "rekindle.dev/submission"  # one `submit`, so that its second attempt knows its first


def submission(manifest: Mapping[str, Any], parameters: Mapping[str, str], namespace: str) -> Object:
    """The Workflow that is sent: named, its parameters set, its manifest's hash upon it. Raises ConfigError."""
    given, reference = _without_reference(manifest, parameters)
    identity = manifests.Identity(time.time(), suffix=random_suffix())
    workflow = manifests.workflow(given, parameters, here=False, identity=identity)
    metadata = workflow["metadata"]
    metadata["annotations"] |= {SHA256: manifest_sha256(manifest), SUBMISSION: str(uuid.uuid4())}
    kept = {key: metadata[key] for key in ("name", "labels", "annotations") if metadata[key]}
    return ordered(workflow | {"metadata": kept | {"namespace": namespace}, "spec": workflow["spec"] | reference})


def _without_reference(manifest: Mapping[str, Any], parameters: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """A workflow that refers to a template leaves it to Argo to find it, and which parameters it declares."""
    spec = manifest.get("spec")
    inner = "workflowSpec" if manifest.get("kind") == "CronWorkflow" else ""
    holder = spec.get(inner) if inner and isinstance(spec, dict) else spec
    if not isinstance(holder, dict) or "workflowTemplateRef" not in holder:
        return manifest, {}
    rest = copy.deepcopy({key: value for key, value in holder.items() if key != "workflowTemplateRef"})
    declared = rest.setdefault("arguments", {}).setdefault("parameters", [])
    declared += [{"name": name} for name in parameters if name not in {each["name"] for each in declared}]
    changed = {**manifest, "spec": {**(spec or {}), inner: rest} if inner else rest}
    return changed, {"workflowTemplateRef": holder["workflowTemplateRef"]}


def submit(cluster: Cluster, workflow: Object) -> Object:
    """Create it, once, even where the answer to the first attempt was lost. Raises ApiError."""
    try:
        return cluster.create(WORKFLOWS, workflow)
    except ApiError as error:
        found = cluster.find(WORKFLOWS, workflow["metadata"]["name"]) if error.code == 409 else None
        ours = workflow["metadata"]["annotations"][SUBMISSION]
        if found and found["metadata"].get("annotations", {}).get(SUBMISSION) == ours:
            return found
        raise


def equal(cluster: Cluster, workflow: Object) -> str | None:
    """The name of a run that has not ended and does the same: equal manifest, equal parameters."""
    running = cluster.listed(WORKFLOWS, f"{names.COMPLETED}!=true", metadata_only=True)
    for each in running:
        if same_manifest(each, workflow) and (found := cluster.find(WORKFLOWS, each["metadata"]["name"])):
            phase = (found.get("status") or {}).get("phase")
            if phase not in COMPLETED and arguments(found) == arguments(workflow):
                return str(found["metadata"]["name"])
    return None


def same_manifest(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    hashes = [(each["metadata"].get("annotations") or {}).get(SHA256) for each in (one, other)]
    return hashes[0] == hashes[1] is not None


def arguments(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that decide what a run does."""
    given = (workflow["spec"].get("arguments") or {}).get("parameters") or []
    return {each["name"]: each.get("value") for each in given if each["name"] not in PROVENANCE}


def read(cluster: Cluster, name: str) -> Object:
    """A workflow with its nodes. Raises ConfigError that knows the names there are."""
    if workflow := cluster.find(WORKFLOWS, name):
        return unpacked(workflow)
    known = {each["metadata"]["name"] for each in cluster.listed(WORKFLOWS, metadata_only=True)}
    raise ConfigError(
        f"there is no workflow {name} in namespace {cluster.namespace}: `rekindle status --cluster` lists all."
        + did_you_mean(name, known)
    )


def newest(cluster: Cluster) -> str:
    """The run that a command without NAME means. Raises ConfigError if there is none."""
    found = cluster.listed(WORKFLOWS, metadata_only=True)
    if not found:
        raise ConfigError(f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run.")
    return str(max(found, key=lambda each: each["metadata"]["creationTimestamp"])["metadata"]["name"])


def unpacked(workflow: Object) -> Object:
    """With the nodes that Argo compressed because they are many."""
    status = workflow.get("status") or {}
    if text := status.get("compressedNodes"):
        nodes = json.loads(gzip.decompress(base64.b64decode(text)))
        rest = {key: value for key, value in status.items() if key != "compressedNodes"}
        return workflow | {"status": rest | {"nodes": nodes}}
    return workflow


def packed(workflow: Object) -> Object:
    """The reverse of `unpacked`."""
    status = dict(workflow["status"])
    nodes = json.dumps(status.pop("nodes")).encode()
    return workflow | {"status": status | {"compressedNodes": base64.b64encode(gzip.compress(nodes)).decode()}}


def offloaded(workflow: Mapping[str, Any]) -> bool:
    """Whether Argo keeps the nodes in its database, where only an Argo server reads them."""
    status = workflow.get("status") or {}
    return bool(status.get("offloadNodeStatusVersion")) and not status.get("nodes")


def stop(cluster: Cluster, name: str) -> None:
    """As `argo stop`: the pods are ended, exit steps run. Raises ConfigError for a run that is over."""
    status = read(cluster, name).get("status") or {}
    if status.get("phase") in COMPLETED:
        raise ConfigError(f"{name} is over ({status['phase']}): nothing is left to stop.")
    cluster.patch(WORKFLOWS, name, {"spec": {"shutdown": "Stop"}})


def delete(cluster: Cluster, name: str) -> None:
    """Remove a run and all that it owns; the object goes last, so its name is free only when nothing is left."""
    cluster.delete(WORKFLOWS, name, propagationPolicy="Foreground")


def resume(cluster: Cluster, name: str) -> str:
    """Go on with a run: release one that is suspended, as `argo resume`; do again what failed, as `argo retry`.

    Finished steps are kept, with their outputs. Gives what was done. Raises ConfigError where there is nothing to do.
    """
    workflow = cluster.find(WORKFLOWS, name) or read(cluster, name)
    nodes = unpacked(workflow)
    phase = (workflow.get("status") or {}).get("phase") or "Pending"
    if offloaded(workflow):
        raise ConfigError(f"Argo keeps the steps of {name} in its database: use `argo resume` or `argo retry` {name}.")
    if phase == "Succeeded":
        raise ConfigError(f"{name} has succeeded: there is nothing to resume. `rekindle submit` starts another run.")
    change, done = (_retried, "tries again what failed") if phase in FAILED else (_released, "continues")
    changed = change(nodes)
    if phase in FAILED:
        _remove_pods(cluster, name, set(nodes["status"].get("nodes") or {}) - set(changed["status"]["nodes"]))
    cluster.replace(WORKFLOWS, packed(changed) if "compressedNodes" in workflow["status"] else changed)
    return done


def _released(workflow: Object) -> Object:
    """Raises ConfigError if it does not wait for anybody."""
    spec, status = dict(workflow["spec"]), dict(workflow.get("status") or {})
    waiting = [n for n in (status.get("nodes") or {}).values() if n["type"] == "Suspend" and n["phase"] == "Running"]
    name = workflow["metadata"]["name"]
    if not spec.pop("suspend", None) and not waiting:
        raise ConfigError(
            f"{name} is {status.get('phase') or 'Pending'} and not suspended: there is nothing to resume."
        )
    for node in waiting:
        for each in (node.get("outputs") or {}).get("parameters") or []:
            if each.get("value") is None and "default" not in (each.get("valueFrom") or {}):
                raise ConfigError(
                    f"{name} waits for the value of {each['name']!r}: give it with "
                    f"`argo node set {name} --output-parameter {each['name']}=VALUE`, then resume."
                )
            each["value"] = each.get("value") or each["valueFrom"]["default"]
        node |= {"phase": "Succeeded", "finishedAt": timestamp(time.time()), "message": "resumed by rekindle"}
    return workflow | {"spec": spec} | ({"status": status} if status else {})


def _retried(workflow: Object) -> Object:
    """As Argo's FormulateRetryWorkflow: failed nodes go, the groups around them run again, nothing is completed."""
    metadata, spec, status = dict(workflow["metadata"]), dict(workflow["spec"]), dict(workflow["status"])
    ended = (names.COMPLETED, names.ARCHIVING_STATUS)
    labels = {label: value for label, value in metadata.get("labels", {}).items() if label not in ended}
    metadata["labels"] = labels | {names.PHASE: "Running"}
    spec.pop("shutdown", None)
    if spec.get("activeDeadlineSeconds") == 0:  # that is how Argo terminates
        spec.pop("activeDeadlineSeconds")
    stored = {k: v for k, v in (status.get("storedWorkflowTemplateSpec") or {}).items() if k != "shutdown"}
    conditions = [each for each in status.get("conditions") or [] if each["type"] != "Completed"]
    fresh = reset({"startedAt": None, "nodes": status.get("nodes") or {}, "outputs": status.get("outputs")})
    known = status.get("taskResultsCompletionStatus") or {}
    for node in fresh["nodes"].values():
        if not node.get("finishedAt"):
            node.pop("finishedAt", None)
        if "outboundNodes" in node:
            node["outboundNodes"] = [each for each in node["outboundNodes"] if each in fresh["nodes"]]
    status |= fresh | {
        "phase": "Running",
        "startedAt": timestamp(time.time()),  # the workflow's deadline counts from here
        "conditions": [*conditions, {"type": "Completed", "status": "False"}],
        "taskResultsCompletionStatus": {id: value for id, value in known.items() if id in fresh["nodes"]},
        "persistentVolumeClaims": [],
    }
    if stored:
        status["storedWorkflowTemplateSpec"] = stored
    kept = {key: value for key, value in status.items() if value is not None}
    return workflow | {"metadata": metadata, "spec": spec, "status": kept}


def _remove_pods(cluster: Cluster, name: str, nodes: set[str]) -> None:
    """A new attempt has the name of the old one's pod. Raises ApiError."""
    for pod in cluster.listed(PODS, f"{names.WORKFLOW}={name}", metadata_only=True):
        if (pod["metadata"].get("annotations") or {}).get(names.NODE_ID) in nodes:
            try:
                cluster.delete(PODS, pod["metadata"]["name"])
            except ApiError as error:
                if error.code != 404:
                    raise


def schedule(cluster: Cluster, template: Object, cron: Object) -> Iterator[str]:
    """Put a WorkflowTemplate and the CronWorkflow that runs it in place; yields what changed, one line each."""
    digest = manifest_sha256(template)
    noted = cron["spec"].get("workflowMetadata") or {}
    noted = noted | {"annotations": {**(noted.get("annotations") or {}), SHA256: digest}}
    cron = cron | {"spec": cron["spec"] | {"workflowMetadata": noted}}
    template = template | {"metadata": template["metadata"] | {"annotations": {SHA256: digest}}}
    for resource, each in ((TEMPLATES, template), (CRONS, cron)):
        yield from apply(cluster, resource, each)


def apply(cluster: Cluster, resource: Resource, wanted: Object) -> Iterator[str]:
    """Create an object, or give the one that is there its `spec`, labels and annotations; yields what changed."""
    metadata = wanted["metadata"] | {"namespace": cluster.namespace}
    title = f"{wanted['kind']} {metadata['name']}"
    there = cluster.find(resource, metadata["name"])
    if there is None:
        cluster.create(resource, wanted | {"metadata": metadata})
        yield f"{title} created"
        return
    merged = {k: {**(there["metadata"].get(k) or {}), **(metadata.get(k) or {})} for k in ("labels", "annotations")}
    changes = list(differences(there["spec"], wanted["spec"], "spec"))
    if not changes and all(merged[key] == (there["metadata"].get(key) or {}) for key in merged):
        yield f"{title} unchanged"
        return
    cluster.replace(resource, there | {"metadata": there["metadata"] | merged, "spec": wanted["spec"]})
    yield f"{title} updated"
    yield from (f"  {each}" for each in changes[:20])
    if len(changes) > 20:
        yield f"  and {len(changes) - 20} more"


def differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """`spec.schedules.0: "0 3 * * 1" → "0 4 * * 1"`: each leaf that differs; named items of a list by their names."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        ours, theirs = ({_key(i, each): each for i, each in enumerate(items)} for items in (old, new))
        for key in dict.fromkeys([*ours, *theirs]):
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}")
    elif isinstance(old, str) and isinstance(new, str) and "\n" in old:
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""):
            if line[0] in "+-" and line[:3] not in ("+++", "---"):
                yield f"{path}: {line[0]} {_cut(line[1:].strip())}"
    elif old != new:
        yield f"{path}: {_short(old)} → {_short(new)}"


def _key(index: int, item: Any) -> str:
    return str(item["name"]) if isinstance(item, dict) and "name" in item else str(index)


def _short(value: Any) -> str:
    return _cut("nothing" if value is None else json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
