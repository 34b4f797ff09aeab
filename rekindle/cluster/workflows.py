"""Submit, read, stop, resume and delete runs in a namespace, and apply schedules.

    workflow = build_submission(manifest, {"message": "hello"}, cluster.namespace)
    submit(cluster, workflow)
    stop_run(cluster, name)
    resume_run(cluster, name)

A Workflow is a dict, as in its manifest. Nodes that Argo has compressed are decompressed; nodes
that Argo has moved to its database (offloaded) are missing.
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
from argolocal.common.wording import truncate
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest import object_labels
from argolocal.manifest import read as manifests
from argolocal.manifest.allowed_values import API_VERSION, COMPLETED_PHASES, FAILED_PHASES
from argolocal.manifest.types import Object
from argolocal.runner.retry_workflow import reset_for_retry
from rekindle.blocks.manifest.provenance import PROVENANCE_PARAMETERS
from rekindle.blocks.manifest.render import manifest_sha256, sort_keys_for_reading
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
from rekindle.errors import ConfigError, RekindleError, suggest_similar

# maximum size of the decompressed nodes in bytes; one node has about one kilobyte
MAX_NODES_BYTES = 100 << 20
SHA256_ANNOTATION = "rekindle.dev/manifest-sha256"
# annotation that identifies one call of `submit`, so that a retry recognizes the workflow that the
# first attempt has created
SUBMISSION_ANNOTATION = "rekindle.dev/submission"

# Pause between applying a WorkflowTemplate and its CronWorkflow. Argo's controller reads templates
# from a cache: if the template is not in the cache yet, the CronWorkflow does not start runs until
# Argo processes the CronWorkflow again, minutes later. The status of the CronWorkflow does not show
# that runs are not started.
TEMPLATE_DELAY_S = 3.0


def build_submission(
    manifest: Mapping[str, Any], parameter_values: Mapping[str, str], namespace: str
) -> Object:
    """Return the Workflow that `submit` creates for a manifest, with a name, parameters and the
    hash of the manifest. Raises ConfigError."""
    own_spec, template_reference = _remove_reference(manifest, parameter_values)
    workflow_identity = manifests.ObjectIdentity(time.time(), suffix=manifests.generate_suffix())
    workflow = manifests.build_workflow(
        own_spec, parameter_values, is_for_this_machine=False, identity=workflow_identity
    )
    workflow_metadata = workflow["metadata"]
    workflow_metadata["annotations"][SHA256_ANNOTATION] = manifest_sha256(manifest)
    workflow_metadata["annotations"][SUBMISSION_ANNOTATION] = str(uuid.uuid4())
    metadata_fields = {
        key: workflow_metadata[key]
        for key in ("name", "labels", "annotations")
        if workflow_metadata[key]
    }

    return sort_keys_for_reading(
        workflow
        | {
            "metadata": metadata_fields | {"namespace": namespace},
            "spec": workflow["spec"] | template_reference,
        }
    )


def _remove_reference(
    manifest: Mapping[str, Any], parameter_values: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """Return the manifest without its reference to a WorkflowTemplate, which only Argo can resolve,
    and the removed field `workflowTemplateRef` ({} if there is none). The returned manifest
    declares all parameters of `parameter_values`."""
    manifest_spec: Any = manifest.get("spec")
    is_cron = manifest.get("kind") == "CronWorkflow" and isinstance(manifest_spec, dict)

    workflow_spec = manifest_spec.get("workflowSpec") if is_cron else manifest_spec
    if not isinstance(workflow_spec, dict) or "workflowTemplateRef" not in workflow_spec:
        return manifest, {}

    own_spec = copy.deepcopy(workflow_spec)
    template_reference = own_spec.pop("workflowTemplateRef")
    parameter_specs = own_spec.setdefault("arguments", {}).setdefault("parameters", [])
    declared_names = {parameter_spec["name"] for parameter_spec in parameter_specs}
    parameter_specs += [{"name": name} for name in parameter_values if name not in declared_names]
    changed_manifest = {
        **manifest,
        "spec": {**manifest_spec, "workflowSpec": own_spec} if is_cron else own_spec,
    }

    return changed_manifest, {"workflowTemplateRef": template_reference}


def submit(cluster: Cluster, workflow: Object) -> Object:
    """Create a workflow exactly once, even if the response to the first attempt is lost. Raises
    ApiError."""
    try:
        return cluster.create(WORKFLOWS, workflow)
    except ApiError as error:
        if error.code == 409:
            existing_workflow = cluster.find(WORKFLOWS, workflow["metadata"]["name"])
        else:
            existing_workflow = None

        submission_id = workflow["metadata"]["annotations"][SUBMISSION_ANNOTATION]
        if (
            existing_workflow
            and (existing_workflow["metadata"].get("annotations") or {}).get(SUBMISSION_ANNOTATION)
            == submission_id
        ):
            return existing_workflow

        raise


def find_duplicate(cluster: Cluster, workflow: Object) -> str | None:
    """Return the name of an active run with the same manifest and parameters, or None."""
    for run_metadata in cluster.list_objects(
        WORKFLOWS, f"{object_labels.COMPLETED_LABEL}!=true", metadata_only=True
    ):
        if not has_same_manifest(run_metadata, workflow):
            continue
        # None if the run was deleted in the meantime
        active_run = cluster.find(WORKFLOWS, run_metadata["metadata"]["name"])
        if active_run is None:
            continue

        run_phase = (active_run.get("status") or {}).get("phase")
        if run_phase not in COMPLETED_PHASES and list_result_parameters(
            active_run
        ) == list_result_parameters(workflow):
            return str(active_run["metadata"]["name"])
    return None


def has_same_manifest(workflow: Mapping[str, Any], second_workflow: Mapping[str, Any]) -> bool:
    """Return True if two workflows record the same hash of their manifest."""
    sha256 = (workflow["metadata"].get("annotations") or {}).get(SHA256_ANNOTATION)
    return sha256 is not None and sha256 == (
        second_workflow["metadata"].get("annotations") or {}
    ).get(SHA256_ANNOTATION)


def get_effective_spec(workflow_object: Mapping[str, Any]) -> Object:
    """Return the spec of a run. If the run has a WorkflowTemplate, include the spec of the
    template."""
    template_spec = (workflow_object.get("status") or {}).get("storedWorkflowTemplateSpec") or {}
    return workflow_object["spec"] | template_spec


def list_result_parameters(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the workflow parameters that affect the result of a run, by name."""
    workflow_parameters = (workflow["spec"].get("arguments") or {}).get("parameters") or []
    return {
        parameter["name"]: parameter.get("value")
        for parameter in workflow_parameters
        if parameter["name"] not in PROVENANCE_PARAMETERS
    }


def read_run(cluster: Cluster, run_name: str) -> Object:
    """Return a workflow with its nodes. Raises ConfigError if the workflow does not exist on the
    cluster."""
    return decompress_nodes(_get_existing(cluster, WORKFLOWS, "workflow", run_name))


def _get_existing(cluster: Cluster, resource: Resource, kind_name: str, object_name: str) -> Object:
    existing_object = cluster.find(resource, object_name)
    if existing_object:
        return existing_object
    existing_names = {
        listed_object["metadata"]["name"]
        for listed_object in cluster.list_objects(resource, metadata_only=True)
    }
    raise ConfigError(
        f"{kind_name} {object_name} does not exist in namespace {cluster.namespace}: `rekindle"
        " status"
        f" --cluster` lists all {kind_name}s." + suggest_similar(object_name, existing_names)
    )


def find_newest_run(cluster: Cluster) -> str:
    """Return the name of the newest run. Raises ConfigError if no run exists."""
    run_objects = cluster.list_objects(WORKFLOWS, metadata_only=True)
    if not run_objects:
        raise ConfigError(
            f"no runs in namespace {cluster.namespace} yet: `rekindle submit CONFIG` starts a run."
        )
    return str(
        max(run_objects, key=lambda run_object: run_object["metadata"]["creationTimestamp"])[
            "metadata"
        ]["name"]
    )


def decompress_nodes(workflow: Object) -> Object:
    """Return the workflow with its nodes decompressed, because Argo compresses the nodes of a large
    workflow. Raises RekindleError if the nodes cannot be read."""
    changed_status = dict(workflow.get("status") or {})

    nodes_text = changed_status.pop("compressedNodes", None)
    if nodes_text:
        try:
            decompressed_nodes = _decompress_text(nodes_text)
        except (ValueError, zlib.error) as error:
            name = workflow["metadata"]["name"]
            raise RekindleError(
                f"the compressed nodes of workflow {name} cannot be read: {error}. Delete the"
                " workflow, or restore it."
            ) from None

        return workflow | {"status": {**changed_status, "nodes": decompressed_nodes}}

    return workflow


def _decompress_text(compressed_text: str) -> Object:
    """Return the nodes of a workflow that Argo has compressed into the field compressedNodes.
    Raises ValueError, zlib.error."""
    # imported in this function, because pydantic would slow down `rekindle --help`
    from rekindle.cluster.objects.validation import find_nodes_fault

    zlib_decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    nodes_json = zlib_decoder.decompress(base64.b64decode(compressed_text), MAX_NODES_BYTES)
    if zlib_decoder.unconsumed_tail:
        raise ValueError(f"they are larger than {MAX_NODES_BYTES >> 20} MiB")

    decompressed_nodes = parse_object(nodes_json)
    if decompressed_nodes is None:
        raise ValueError("they are not a JSON object")

    nodes_fault = find_nodes_fault(decompressed_nodes)
    if nodes_fault:
        raise ValueError(nodes_fault)
    return decompressed_nodes


def compress_nodes(workflow: Object) -> Object:
    """Return the workflow with its nodes compressed as Argo does."""
    changed_status = dict(workflow["status"])
    nodes_json = to_json(changed_status.pop("nodes")).encode()
    return workflow | {
        "status": changed_status
        | {"compressedNodes": base64.b64encode(gzip.compress(nodes_json)).decode()}
    }


def is_offloaded(workflow: Mapping[str, Any]) -> bool:
    """Return True if the nodes are in Argo's database, which only an Argo server can read."""
    workflow_status = workflow.get("status") or {}
    return bool(workflow_status.get("offloadNodeStatusVersion")) and not workflow_status.get(
        "nodes"
    )


def stop_run(cluster: Cluster, run_name: str) -> None:
    """Stop a run as `argo stop` does: its pods end, then its exit tasks run. Raises ConfigError if
    the run has completed."""
    workflow_status = read_run(cluster, run_name).get("status") or {}
    if workflow_status.get("phase") in COMPLETED_PHASES:
        raise ConfigError(
            f"{run_name} has completed ({workflow_status['phase']}): there is nothing to stop."
        )
    cluster.patch(WORKFLOWS, run_name, {"spec": {"shutdown": "Stop"}})


def delete_run(cluster: Cluster, run_name: str) -> None:
    """Delete all objects that a run owns, and then the Workflow itself, so that its name is free
    only when all these objects are deleted."""
    cluster.delete(WORKFLOWS, run_name, propagationPolicy="Foreground")


def resume_run(cluster: Cluster, name: str) -> str:
    """Resume a suspended run as `argo resume` does, or retry a failed run as `argo retry` does.
    Return a description of the change.

    Completed steps keep their outputs. Raises ConfigError if the run is neither suspended nor
    failed.
    """
    workflow = cluster.find(WORKFLOWS, name) or read_run(cluster, name)
    decompressed_workflow = decompress_nodes(workflow)
    run_phase = (workflow.get("status") or {}).get("phase") or "Pending"

    if is_offloaded(workflow):
        raise ConfigError(
            f"Argo keeps the steps of {name} in its database: use `argo resume` or `argo retry`"
            f" {name}."
        )

    if run_phase == "Succeeded":
        raise ConfigError(
            f"{name} has succeeded: there is nothing to resume. `rekindle submit` starts another"
            " run."
        )

    if run_phase in FAILED_PHASES:
        change_description = "retries its failed steps"
        changed_workflow = _build_retry(decompressed_workflow)
        remaining_nodes = set(changed_workflow["status"]["nodes"])
        _remove_pods(
            cluster, name, set(decompressed_workflow["status"].get("nodes") or {}) - remaining_nodes
        )
    else:
        change_description = "continues"
        changed_workflow = _continue_suspended(decompressed_workflow)

    if "compressedNodes" in (workflow.get("status") or {}):
        changed_workflow = compress_nodes(changed_workflow)

    cluster.replace(WORKFLOWS, changed_workflow)
    return change_description


def _continue_suspended(workflow: Object) -> Object:
    """Return the workflow with all suspended nodes resumed, and with `spec.suspend` removed. Raises
    ConfigError if the run is not suspended."""
    changed_spec = dict(workflow["spec"])
    changed_status = dict(workflow.get("status") or {})

    suspended_nodes = [
        workflow_node
        for workflow_node in (changed_status.get("nodes") or {}).values()
        if workflow_node["type"] == "Suspend" and workflow_node.get("phase") == "Running"
    ]

    name = workflow["metadata"]["name"]

    if not changed_spec.pop("suspend", None) and not suspended_nodes:
        raise ConfigError(
            f"{name} is {changed_status.get('phase') or 'Pending'} and not suspended: there is"
            " nothing to resume."
        )

    for suspended_node in suspended_nodes:
        for output_parameter in (suspended_node.get("outputs") or {}).get("parameters") or []:
            if output_parameter.get("value") is None and "default" not in (
                output_parameter.get("valueFrom") or {}
            ):
                raise ConfigError(
                    f"{name} waits for the value of {output_parameter['name']!r}: give it with"
                    f" `argo node set {name} --output-parameter {output_parameter['name']}=VALUE`,"
                    " then resume."
                )

            default_value = (output_parameter.get("valueFrom") or {}).get("default")
            output_parameter["value"] = output_parameter.get("value") or default_value or ""

        suspended_node["phase"] = "Succeeded"
        suspended_node["finishedAt"] = format_timestamp(time.time())
        suspended_node["message"] = "resumed by rekindle"

    return (
        workflow | {"spec": changed_spec} | ({"status": changed_status} if changed_status else {})
    )


def _build_retry(workflow: Object) -> Object:
    """Return the workflow in the state in which Argo retries it (FormulateRetryWorkflow): failed
    nodes are removed, and their parent groups have the phase Running."""
    changed_metadata = dict(workflow["metadata"])
    changed_spec = dict(workflow["spec"])
    changed_status = dict(workflow["status"])
    changed_labels = {
        **(changed_metadata.get("labels") or {}),
        object_labels.PHASE_LABEL: "Running",
    }

    for removed_label in (object_labels.COMPLETED_LABEL, object_labels.ARCHIVING_STATUS_LABEL):
        changed_labels.pop(removed_label, None)

    changed_metadata["labels"] = changed_labels
    changed_spec.pop("shutdown", None)
    # remove the deadline 0, which `argo terminate` sets
    if changed_spec.get("activeDeadlineSeconds") == 0:
        changed_spec.pop("activeDeadlineSeconds")

    template_spec = {
        field_name: field_value
        for field_name, field_value in (
            changed_status.get("storedWorkflowTemplateSpec") or {}
        ).items()
        if field_name != "shutdown"
    }
    conditions = [
        condition
        for condition in changed_status.get("conditions") or []
        if condition["type"] != "Completed"
    ]

    reset_state = reset_for_retry(
        {
            "startedAt": None,
            "nodes": changed_status.get("nodes") or {},
            "outputs": changed_status.get("outputs"),
        }
    )
    task_results = changed_status.get("taskResultsCompletionStatus") or {}

    for remaining_node in reset_state["nodes"].values():
        if not remaining_node.get("finishedAt"):
            remaining_node.pop("finishedAt", None)
        if "outboundNodes" in remaining_node:
            remaining_node["outboundNodes"] = [
                outbound_id
                for outbound_id in remaining_node["outboundNodes"]
                if outbound_id in reset_state["nodes"]
            ]

    changed_status.update(
        reset_state
        | {
            "phase": "Running",
            # a new start time, because the workflow's deadline counts from the start time
            "startedAt": format_timestamp(time.time()),
            "conditions": [*conditions, {"type": "Completed", "status": "False"}],
            "taskResultsCompletionStatus": {
                node_id: is_complete
                for node_id, is_complete in task_results.items()
                if node_id in reset_state["nodes"]
            },
            "persistentVolumeClaims": [],
        }
    )
    if template_spec:
        changed_status["storedWorkflowTemplateSpec"] = template_spec

    new_status = {
        key: field_value for key, field_value in changed_status.items() if field_value is not None
    }
    return workflow | {"metadata": changed_metadata, "spec": changed_spec, "status": new_status}


def _remove_pods(cluster: Cluster, run_name: str, node_ids: set[str]) -> None:
    """Delete the pods of the nodes `node_ids`, because the pods of new attempts get the same names.
    Raises ApiError."""
    for pod_object in cluster.list_objects(
        PODS, f"{object_labels.WORKFLOW}={run_name}", metadata_only=True
    ):
        if (pod_object["metadata"].get("annotations") or {}).get(
            object_labels.NODE_ID_ANNOTATION
        ) in node_ids:
            cluster.delete(PODS, pod_object["metadata"]["name"])


def apply_schedule(
    cluster: Cluster, workflow_template: Object, cron_workflow: Object
) -> Iterator[str]:
    """Apply a WorkflowTemplate and the CronWorkflow that runs it; yield the changes as lines of
    text. Waits after a new template (see TEMPLATE_DELAY_S)."""
    hash_annotation = {SHA256_ANNOTATION: manifest_sha256(workflow_template)}
    workflow_metadata = cron_workflow["spec"].get("workflowMetadata") or {}
    workflow_metadata = workflow_metadata | {
        "annotations": (workflow_metadata.get("annotations") or {}) | hash_annotation
    }
    cron_workflow = cron_workflow | {
        "spec": cron_workflow["spec"] | {"workflowMetadata": workflow_metadata}
    }
    workflow_template = workflow_template | {
        "metadata": workflow_template["metadata"] | {"annotations": hash_annotation}
    }
    change_lines = list(apply_object(cluster, WORKFLOW_TEMPLATES, workflow_template))
    yield from change_lines
    if change_lines[0].endswith(" created"):
        time.sleep(TEMPLATE_DELAY_S)
    yield from apply_object(cluster, CRON_WORKFLOWS, cron_workflow)


def build_scheduled_workflow(
    cluster: Cluster, schedule_name: str, parameter_values: Mapping[str, str] = {}
) -> Object:
    """Return the Workflow that the schedule `schedule_name` would create now. Raises ConfigError if
    the schedule `schedule_name` does not exist."""
    cron_workflow = _get_existing(cluster, CRON_WORKFLOWS, "schedule", schedule_name)

    cron_manifest = {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": {"name": schedule_name},
        "spec": cron_workflow["spec"],
    }

    workflow = build_submission(cron_manifest, parameter_values, cluster.namespace)

    template_sha256 = (
        (cron_workflow["spec"].get("workflowMetadata") or {}).get("annotations") or {}
    ).get(SHA256_ANNOTATION)
    if template_sha256:
        # use the hash of the template, because the runs that the schedule starts have the same hash
        workflow["metadata"]["annotations"][SHA256_ANNOTATION] = template_sha256

    return workflow


def delete_schedule(cluster: Cluster, schedule_name: str) -> None:
    """Delete a schedule and its WorkflowTemplate, but not the runs of the schedule.

    Raises ConfigError if the schedule does not exist.
    """
    cron_spec = (
        _get_existing(cluster, CRON_WORKFLOWS, "schedule", schedule_name)["spec"].get(
            "workflowSpec"
        )
        or {}
    )
    cluster.delete(CRON_WORKFLOWS, schedule_name, propagationPolicy="Orphan")
    if (cron_spec.get("workflowTemplateRef") or {}).get("name") != schedule_name:
        return

    workflow_template = cluster.find(WORKFLOW_TEMPLATES, schedule_name)
    if workflow_template and SHA256_ANNOTATION in (
        workflow_template["metadata"].get("annotations") or {}
    ):
        cluster.delete(WORKFLOW_TEMPLATES, schedule_name)


def apply_object(cluster: Cluster, resource: Resource, manifest: Object) -> Iterator[str]:
    """Create an object, or update its `spec`, labels and annotations; yield the changes as
    lines."""
    object_metadata = manifest["metadata"] | {"namespace": cluster.namespace}
    object_title = f"{manifest['kind']} {object_metadata['name']}"

    existing_object = cluster.find(resource, object_metadata["name"])
    if existing_object is None:
        cluster.create(resource, manifest | {"metadata": object_metadata})
        yield f"{object_title} created"
        return

    merged_metadata = {
        field_name: {
            **(existing_object["metadata"].get(field_name) or {}),
            **(object_metadata.get(field_name) or {}),
        }
        for field_name in ("labels", "annotations")
    }
    change_lines = list(describe_differences(existing_object["spec"], manifest["spec"], "spec"))
    if not change_lines and all(
        merged_metadata[key] == (existing_object["metadata"].get(key) or {})
        for key in merged_metadata
    ):
        yield f"{object_title} unchanged"
        return

    cluster.replace(
        resource,
        existing_object
        | {"metadata": existing_object["metadata"] | merged_metadata, "spec": manifest["spec"]},
    )
    yield f"{object_title} updated"
    yield from (f"  {change_line}" for change_line in change_lines[:20])

    if len(change_lines) > 20:
        yield f"  and {len(change_lines) - 20} more"


def describe_differences(old_value: object, new_value: object, path: str) -> Iterator[str]:
    """Yield each difference as a line such as `spec.schedules.0: "0 3 * * 1" → "0 4 * * 1"`. In a
    path, a list item is denoted by its field `name` or, without this field, by its index."""
    if isinstance(old_value, dict) and isinstance(new_value, dict):
        for key in dict.fromkeys([*old_value, *new_value]):
            yield from describe_differences(old_value.get(key), new_value.get(key), f"{path}.{key}")
    elif isinstance(old_value, list) and isinstance(new_value, list):
        yield from describe_differences(_key_items(old_value), _key_items(new_value), path)
    elif isinstance(old_value, str) and isinstance(new_value, str) and "\n" in old_value:
        for difference_line in difflib.unified_diff(
            old_value.splitlines(), new_value.splitlines(), n=0, lineterm=""
        ):
            if difference_line[0] in "+-" and difference_line[:3] not in ("+++", "---"):
                yield f"{path}: {difference_line[0]} {truncate(difference_line[1:].strip())}"
    elif old_value != new_value:
        yield f"{path}: {_format_value(old_value)} → {_format_value(new_value)}"


def _key_items(list_items: list[Any]) -> dict[str, Any]:
    """Return the items of a list by their field `name` or, without this field, by their index."""
    items_by_key: dict[str, Any] = {}
    for index, list_item in enumerate(list_items):
        is_named = isinstance(list_item, dict) and "name" in list_item
        items_by_key[str(list_item["name"] if is_named else index)] = list_item
    return items_by_key


def _format_value(field_value: object) -> str:
    return truncate("nothing" if field_value is None else to_json(field_value, ensure_ascii=False))
