"""Submit, read, stop, resume and delete runs in a namespace, and apply schedules.

    workflow = submission(manifest, {"message": "hello"}, cluster.namespace)
    submit(cluster, workflow); stop(cluster, name); resume(cluster, name)

A Workflow is a dict, as in its manifest. Nodes that Argo has compressed are decompressed; nodes
that Argo has offloaded to its database are missing.
"""

import base64
import copy
import difflib
import gzip
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.wording import cut
from argolocal.language.gofmt import timestamp
from argolocal.manifest import object_labels
from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import API_VERSION, COMPLETED, FAILED
from argolocal.manifest.types import Object
from argolocal.runner.retry_workflow import reset_for_retry
from rekindle.blocks.manifest.provenance import PROVENANCE_PARAMETERS
from rekindle.blocks.manifest.render import manifest_sha256, order_keys
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import (
    CRON_WORKFLOWS,
    PODS,
    WORKFLOW_TEMPLATES,
    WORKFLOWS,
    Cluster,
    Resource,
    parse_object,
)
from rekindle.errors import ConfigError, RekindleError, did_you_mean

# maximum size of the decompressed nodes in bytes; one node has about one kilobyte
MAX_NODES_BYTES = 100 << 20
SHA256_ANNOTATION = "rekindle.dev/manifest-sha256"
# annotation that identifies one call of `submit`, so that a retry recognizes the workflow that the
# first attempt has created
SUBMISSION_ANNOTATION = "rekindle.dev/submission"

# Pause between applying a WorkflowTemplate and its CronWorkflow. Argo's controller reads templates
# from a cache: if the template is not in the cache yet, the CronWorkflow does not start runs until
# Argo processes the CronWorkflow again, minutes later. The status of the CronWorkflow does not show
# this.
TEMPLATE_DELAY_S = 3.0


def build_submission(
    manifest: Mapping[str, Any], parameters: Mapping[str, str], namespace: str
) -> Object:
    """Return the Workflow that `submit` creates for a manifest, with a name, parameters and the
    hash of the manifest. Raises ConfigError."""
    own_spec, reference = _without_reference(manifest, parameters)
    identity = manifests.Identity(time.time(), suffix=manifests.generate_suffix())
    workflow = manifests.workflow(own_spec, parameters, for_this_machine=False, identity=identity)
    metadata = workflow["metadata"]
    metadata["annotations"][SHA256_ANNOTATION] = manifest_sha256(manifest)
    metadata["annotations"][SUBMISSION_ANNOTATION] = str(uuid.uuid4())
    fields = {key: metadata[key] for key in ("name", "labels", "annotations") if metadata[key]}

    return order_keys(
        workflow
        | {
            "metadata": fields | {"namespace": namespace},
            "spec": workflow["spec"] | reference,
        }
    )


def _without_reference(
    manifest: Mapping[str, Any], parameters: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """Return the manifest without its reference to a WorkflowTemplate, which only Argo can resolve,
    and with all `parameters` declared. Also return the removed field `workflowTemplateRef`, or
    {}."""
    spec: Any = manifest.get("spec")
    is_cron = manifest.get("kind") == "CronWorkflow" and isinstance(spec, dict)

    workflow_spec = spec.get("workflowSpec") if is_cron else spec
    if not isinstance(workflow_spec, dict) or "workflowTemplateRef" not in workflow_spec:
        return manifest, {}

    own_spec = copy.deepcopy(workflow_spec)
    reference = own_spec.pop("workflowTemplateRef")
    parameter_specs = own_spec.setdefault("arguments", {}).setdefault("parameters", [])
    names_declared = {parameter["name"] for parameter in parameter_specs}
    parameter_specs += [{"name": name} for name in parameters if name not in names_declared]
    changed_manifest = {
        **manifest,
        "spec": {**spec, "workflowSpec": own_spec} if is_cron else own_spec,
    }

    return changed_manifest, {"workflowTemplateRef": reference}


def submit(cluster: Cluster, workflow: Object) -> Object:
    """Create a workflow exactly once, even if the response to the first attempt is lost. Raises
    ApiError."""
    try:
        return cluster.create(WORKFLOWS, workflow)
    except ApiError as error:
        if error.code == 409:
            existing = cluster.find(WORKFLOWS, workflow["metadata"]["name"])
        else:
            existing = None

        submission_id = workflow["metadata"]["annotations"][SUBMISSION_ANNOTATION]
        if (
            existing
            and (existing["metadata"].get("annotations") or {}).get(SUBMISSION_ANNOTATION)
            == submission_id
        ):
            return existing

        raise


def find_duplicate(cluster: Cluster, workflow: Object) -> str | None:
    """Return the name of an active run with the same manifest and parameters, or None."""
    for metadata_entry in cluster.list_objects(
        WORKFLOWS, f"{object_labels.COMPLETED}!=true", metadata_only=True
    ):
        if has_same_manifest(metadata_entry, workflow) and (
            active_run := cluster.find(WORKFLOWS, metadata_entry["metadata"]["name"])
        ):
            phase = (active_run.get("status") or {}).get("phase")
            if phase not in COMPLETED and result_parameters(active_run) == result_parameters(
                workflow
            ):
                return str(active_run["metadata"]["name"])
    return None


def has_same_manifest(workflow: Mapping[str, Any], second_workflow: Mapping[str, Any]) -> bool:
    sha256 = (workflow["metadata"].get("annotations") or {}).get(SHA256_ANNOTATION)
    return sha256 is not None and sha256 == (
        second_workflow["metadata"].get("annotations") or {}
    ).get(SHA256_ANNOTATION)


def spec_of(workflow: Mapping[str, Any]) -> Object:
    """Return the spec of a run. If the run has a WorkflowTemplate, include the spec of the
    template."""
    template_spec = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec") or {}
    return workflow["spec"] | template_spec


def result_parameters(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workflow parameters that affect the result of a run, by name."""
    parameters = (workflow["spec"].get("arguments") or {}).get("parameters") or []
    return {p["name"]: p.get("value") for p in parameters if p["name"] not in PROVENANCE_PARAMETERS}


def read_run(cluster: Cluster, name: str) -> Object:
    """Return a workflow with its nodes. Raises ConfigError if the workflow does not exist."""
    return decompress_nodes(_get_existing(cluster, WORKFLOWS, "workflow", name))


def _get_existing(cluster: Cluster, resource: Resource, kind: str, name: str) -> Object:
    obj = cluster.find(resource, name)
    if obj:
        return obj
    existing_names = {
        listed["metadata"]["name"] for listed in cluster.list_objects(resource, metadata_only=True)
    }
    raise ConfigError(
        f"{kind} {name} does not exist in namespace {cluster.namespace}: `rekindle status"
        f" --cluster` lists all {kind}s." + did_you_mean(name, existing_names)
    )


def newest_run(cluster: Cluster) -> str:
    """Return the name of the newest run. Raises ConfigError if no run exists."""
    runs = cluster.list_objects(WORKFLOWS, metadata_only=True)
    if not runs:
        raise ConfigError(
            f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run."
        )
    return str(max(runs, key=lambda run: run["metadata"]["creationTimestamp"])["metadata"]["name"])


def decompress_nodes(workflow: Object) -> Object:
    """Return the workflow with its nodes decompressed; Argo compresses the nodes of a large
    workflow."""
    status = dict(workflow.get("status") or {})

    text = status.pop("compressedNodes", None)
    if text:
        try:
            nodes = _decompress(text)
        except (ValueError, zlib.error) as error:
            name = workflow["metadata"]["name"]
            raise RekindleError(
                f"the compressed nodes of workflow {name} cannot be read: {error}. Delete the"
                " workflow, or restore it."
            ) from None

        return workflow | {"status": {**status, "nodes": nodes}}

    return workflow


def _decompress(text: str) -> Object:
    """Return the nodes in the field compressedNodes. Raises ValueError, zlib.error."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from rekindle.cluster.objects.validation import find_nodes_fault

    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    data = decoder.decompress(base64.b64decode(text), MAX_NODES_BYTES)
    if decoder.unconsumed_tail:
        raise ValueError(f"they are larger than {MAX_NODES_BYTES >> 20} MiB")

    nodes = parse_object(data)
    if nodes is None:
        raise ValueError("they are not a JSON object")

    fault = find_nodes_fault(nodes)
    if fault:
        raise ValueError(fault)
    return nodes


def compress_nodes(workflow: Object) -> Object:
    """Return the workflow with its nodes compressed as Argo does."""
    status = dict(workflow["status"])
    nodes = to_json(status.pop("nodes")).encode()
    return workflow | {
        "status": status | {"compressedNodes": base64.b64encode(gzip.compress(nodes)).decode()}
    }


def is_offloaded(workflow: Mapping[str, Any]) -> bool:
    """Return True if the nodes are in Argo's database, which only an Argo server can read."""
    status = workflow.get("status") or {}
    return bool(status.get("offloadNodeStatusVersion")) and not status.get("nodes")


def stop_run(cluster: Cluster, name: str) -> None:
    """Stop a run as `argo stop` does: its pods end, then its exit tasks run. Raises ConfigError if
    the run has completed."""
    status = read_run(cluster, name).get("status") or {}
    if status.get("phase") in COMPLETED:
        raise ConfigError(f"{name} has completed ({status['phase']}): there is nothing to stop.")
    cluster.patch(WORKFLOWS, name, {"spec": {"shutdown": "Stop"}})


def delete_run(cluster: Cluster, name: str) -> None:
    """Delete all objects that a run owns, and last the Workflow, so that its name can be reused
    only when all objects are gone."""
    cluster.delete(WORKFLOWS, name, propagationPolicy="Foreground")


def resume_run(cluster: Cluster, name: str) -> str:
    """Resume a suspended run as `argo resume` does, or retry a failed run as `argo retry` does.
    Return a description of the change.

    Completed steps keep their outputs. Raises ConfigError if the run is neither suspended nor
    failed.
    """
    workflow = cluster.find(WORKFLOWS, name) or read_run(cluster, name)
    nodes = decompress_nodes(workflow)
    phase = (workflow.get("status") or {}).get("phase") or "Pending"

    if is_offloaded(workflow):
        raise ConfigError(
            f"Argo keeps the steps of {name} in its database: use `argo resume` or `argo retry`"
            f" {name}."
        )

    if phase == "Succeeded":
        raise ConfigError(
            f"{name} has succeeded: there is nothing to resume. `rekindle submit` starts another"
            " run."
        )

    if phase in FAILED:
        description = "retries its failed steps"
        changed_workflow = _retry(nodes)
        remaining_nodes = set(changed_workflow["status"]["nodes"])
        _remove_pods(cluster, name, set(nodes["status"].get("nodes") or {}) - remaining_nodes)
    else:
        description = "continues"
        changed_workflow = _continue_suspended(nodes)

    if "compressedNodes" in (workflow.get("status") or {}):
        changed_workflow = compress_nodes(changed_workflow)

    cluster.replace(WORKFLOWS, changed_workflow)
    return description


def _continue_suspended(workflow: Object) -> Object:
    """Return the workflow with its suspended nodes resumed, and no longer suspended itself. Raises
    ConfigError if the run is not suspended."""
    spec = dict(workflow["spec"])
    status = dict(workflow.get("status") or {})

    suspended_nodes = [
        n
        for n in (status.get("nodes") or {}).values()
        if n["type"] == "Suspend" and n.get("phase") == "Running"
    ]

    name = workflow["metadata"]["name"]

    if not spec.pop("suspend", None) and not suspended_nodes:
        raise ConfigError(
            f"{name} is {status.get('phase') or 'Pending'} and not suspended: there is nothing to"
            " resume."
        )

    for node in suspended_nodes:
        for output in (node.get("outputs") or {}).get("parameters") or []:
            if output.get("value") is None and "default" not in (output.get("valueFrom") or {}):
                raise ConfigError(
                    f"{name} waits for the value of {output['name']!r}: give it with `argo node set"
                    f" {name} --output-parameter {output['name']}=VALUE`, then resume."
                )

            default = (output.get("valueFrom") or {}).get("default")
            output["value"] = output.get("value") or default or ""

        node["phase"] = "Succeeded"
        node["finishedAt"] = timestamp(time.time())
        node["message"] = "resumed by rekindle"

    return workflow | {"spec": spec} | ({"status": status} if status else {})


def _retry(workflow: Object) -> Object:
    """Return the workflow as Argo's FormulateRetryWorkflow does: failed nodes are removed, and
    their parent groups have the phase Running."""
    metadata = dict(workflow["metadata"])
    spec = dict(workflow["spec"])
    status = dict(workflow["status"])
    labels = {**(metadata.get("labels") or {}), object_labels.PHASE: "Running"}

    for label in (object_labels.COMPLETED, object_labels.ARCHIVING_STATUS):
        labels.pop(label, None)

    metadata["labels"] = labels
    spec.pop("shutdown", None)
    # remove the deadline 0, which `argo terminate` sets
    if spec.get("activeDeadlineSeconds") == 0:
        spec.pop("activeDeadlineSeconds")

    template_spec = {
        k: v for k, v in (status.get("storedWorkflowTemplateSpec") or {}).items() if k != "shutdown"
    }
    conditions = [
        condition
        for condition in status.get("conditions") or []
        if condition["type"] != "Completed"
    ]

    remaining = reset_for_retry(
        {"startedAt": None, "nodes": status.get("nodes") or {}, "outputs": status.get("outputs")}
    )
    task_results = status.get("taskResultsCompletionStatus") or {}

    for node in remaining["nodes"].values():
        if not node.get("finishedAt"):
            node.pop("finishedAt", None)
        if "outboundNodes" in node:
            node["outboundNodes"] = [id for id in node["outboundNodes"] if id in remaining["nodes"]]

    status.update(
        remaining
        | {
            "phase": "Running",
            # the retry gets a new start time, because the workflow's deadline counts from its start
            # time
            "startedAt": timestamp(time.time()),
            "conditions": [*conditions, {"type": "Completed", "status": "False"}],
            "taskResultsCompletionStatus": {
                id: value for id, value in task_results.items() if id in remaining["nodes"]
            },
            "persistentVolumeClaims": [],
        }
    )
    if template_spec:
        status["storedWorkflowTemplateSpec"] = template_spec

    new_status = {key: value for key, value in status.items() if value is not None}
    return workflow | {"metadata": metadata, "spec": spec, "status": new_status}


def _remove_pods(cluster: Cluster, name: str, nodes: set[str]) -> None:
    """Delete the pods of `nodes`, because the pods of new attempts get the same names. Raises
    ApiError."""
    for pod in cluster.list_objects(PODS, f"{object_labels.WORKFLOW}={name}", metadata_only=True):
        if (pod["metadata"].get("annotations") or {}).get(object_labels.NODE_ID) in nodes:
            cluster.delete(PODS, pod["metadata"]["name"])


def apply_schedule(cluster: Cluster, template: Object, cron: Object) -> Iterator[str]:
    """Apply a WorkflowTemplate and the CronWorkflow that runs it; yield the changes as lines."""
    sha256 = {SHA256_ANNOTATION: manifest_sha256(template)}
    metadata = cron["spec"].get("workflowMetadata") or {}
    metadata = metadata | {"annotations": (metadata.get("annotations") or {}) | sha256}
    cron = cron | {"spec": cron["spec"] | {"workflowMetadata": metadata}}
    template = template | {"metadata": template["metadata"] | {"annotations": sha256}}
    changes = list(apply_object(cluster, WORKFLOW_TEMPLATES, template))
    yield from changes
    if changes[0].endswith(" created"):
        time.sleep(TEMPLATE_DELAY_S)
    yield from apply_object(cluster, CRON_WORKFLOWS, cron)


def scheduled_workflow(cluster: Cluster, name: str, parameters: Mapping[str, str] = {}) -> Object:
    """Return the Workflow that the schedule `name` would create now. Raises ConfigError if no such
    schedule exists."""
    cron = _get_existing(cluster, CRON_WORKFLOWS, "schedule", name)

    manifest = {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": {"name": name},
        "spec": cron["spec"],
    }

    workflow = build_submission(manifest, parameters, cluster.namespace)

    sha256 = ((cron["spec"].get("workflowMetadata") or {}).get("annotations") or {}).get(
        SHA256_ANNOTATION
    )
    if sha256:
        # use the hash of the template, because the runs that the schedule starts have the same hash
        workflow["metadata"]["annotations"][SHA256_ANNOTATION] = sha256

    return workflow


def delete_schedule(cluster: Cluster, name: str) -> None:
    """Delete a schedule and the WorkflowTemplate that `schedule` has created, but not the runs.

    Raises ConfigError if no such schedule exists.
    """
    spec = (
        _get_existing(cluster, CRON_WORKFLOWS, "schedule", name)["spec"].get("workflowSpec") or {}
    )
    cluster.delete(CRON_WORKFLOWS, name, propagationPolicy="Orphan")
    if (spec.get("workflowTemplateRef") or {}).get("name") != name:
        return

    template = cluster.find(WORKFLOW_TEMPLATES, name)
    if template and SHA256_ANNOTATION in (template["metadata"].get("annotations") or {}):
        cluster.delete(WORKFLOW_TEMPLATES, name)


def apply_object(cluster: Cluster, resource: Resource, manifest: Object) -> Iterator[str]:
    """Create an object, or update its `spec`, labels and annotations; yield the changes as
    lines."""
    metadata = manifest["metadata"] | {"namespace": cluster.namespace}
    title = f"{manifest['kind']} {metadata['name']}"

    existing = cluster.find(resource, metadata["name"])
    if existing is None:
        cluster.create(resource, manifest | {"metadata": metadata})
        yield f"{title} created"
        return

    merged_metadata = {
        k: {**(existing["metadata"].get(k) or {}), **(metadata.get(k) or {})}
        for k in ("labels", "annotations")
    }
    changes = list(describe_differences(existing["spec"], manifest["spec"], "spec"))
    if not changes and all(
        merged_metadata[key] == (existing["metadata"].get(key) or {}) for key in merged_metadata
    ):
        yield f"{title} unchanged"
        return

    cluster.replace(
        resource,
        existing | {"metadata": existing["metadata"] | merged_metadata, "spec": manifest["spec"]},
    )
    yield f"{title} updated"
    yield from (f"  {change}" for change in changes[:20])

    if len(changes) > 20:
        yield f"  and {len(changes) - 20} more"


def describe_differences(old: object, new: object, path: str) -> Iterator[str]:
    """Yield each difference as a line such as `spec.schedules.0: "0 3 * * 1" → "0 4 * * 1"`. In a
    path, a list item is denoted by its field `name` or, without this field, by its index."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from describe_differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        old, new = (
            {_item_key(i, item): item for i, item in enumerate(items)} for items in (old, new)
        )
        yield from describe_differences(old, new, path)
    elif isinstance(old, str) and isinstance(new, str) and "\n" in old:
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""):
            if line[0] in "+-" and line[:3] not in ("+++", "---"):
                yield f"{path}: {line[0]} {cut(line[1:].strip())}"
    elif old != new:
        yield f"{path}: {_format_value(old)} → {_format_value(new)}"


def _item_key(index: int, item: object) -> str:
    if isinstance(item, dict) and "name" in item:
        return str(item["name"])
    return str(index)


def _format_value(value: object) -> str:
    return cut("nothing" if value is None else to_json(value, ensure_ascii=False))
