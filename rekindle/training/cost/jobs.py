"""The Kubernetes jobs that the steps of a run apply, such as the job of `blocks.job`: their pods,
time and outcome.

Elastic trainings are left out, because their ledger records the time of each worker.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common import causes
from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.allowed_values import FULFILLED_PHASES
from argolocal.manifest.types import Manifest
from argolocal.view.summary import parse_timestamp
from rekindle.kubernetes_names import COORDINATOR_MODULES, LAUNCHERS
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import PodReplicas
from rekindle.training.cost.prices import Prices


@dataclass(frozen=True)
class AppliedJob:
    """A job that a step has applied. The duration of a job is the duration of its step, which waits
    for the job."""

    task: str
    kind: str
    replicas: tuple[PodReplicas, ...]
    phase: str = "Waiting"
    seconds: float = 0.0
    message: str = ""

    def cost(self, prices: Prices) -> float:
        """Return the cost of all pods of the job. Raises ConfigError if a pod has no price."""
        return sum(
            pod_replicas.count * prices.compute_pod_cost(pod_replicas.pod, self.seconds)
            for pod_replicas in self.replicas
        )


def collect_templates(
    workflow_status: Mapping[str, Any], manifest: Manifest
) -> dict[str, Manifest]:
    """Return the templates of a run: the templates of its manifest by name, and the templates of
    WorkflowTemplates by SCOPE/OBJECT/NAME, where SCOPE is `namespaced` or `cluster`."""
    stored_templates = {
        **(manifest.get("storedTemplates") or {}),
        **(workflow_status.get("storedTemplates") or {}),
    }
    return stored_templates | {
        template["name"]: template
        for template in manifest["spec"].get("templates") or []
        if "name" in template
    }


def find_template(
    workflow_node: Mapping[str, Any], templates_by_name: Mapping[str, Manifest]
) -> Manifest | None:
    """Return the template of a node, which may belong to a WorkflowTemplate."""
    template_name = str(workflow_node.get("templateName") or "")
    template_scope = str(workflow_node.get("templateScope") or "")
    template_reference = workflow_node.get("templateRef")
    if template_reference:
        scope_kind = "cluster" if template_reference.get("clusterScope") else "namespaced"
        template_scope = f"{scope_kind}/{template_reference['name']}"
        template_name = template_reference["template"]
    is_stored = template_scope.startswith(("namespaced/", "cluster/"))
    return templates_by_name.get(
        f"{template_scope}/{template_name}" if is_stored else template_name,
        templates_by_name.get(template_name),
    )


def parse_task_path(workflow_node: Mapping[str, Any]) -> str:
    """Return the path of the node's task, without the indices of loop items and attempts."""
    return workflow_node["name"].partition(".")[2].partition("(")[0] or workflow_node["name"]


def find_end_time(workflow_node: Mapping[str, Any], workflow_status: Mapping[str, Any]) -> float:
    """Return the end time of a node of a workflow. For a node that has not ended, return the end of
    the run, or the current time."""
    end_time_text = workflow_node.get("finishedAt") or workflow_status.get("finishedAt")
    if end_time_text:
        return parse_timestamp(end_time_text)
    return time.time()


def list_job_runs(workflow_status: Mapping[str, Any], manifest: Manifest) -> list[AppliedJob]:
    """Return the jobs that the steps of a run have applied."""
    templates_by_name = collect_templates(workflow_status, manifest)
    training_runtimes = pod_requests.list_training_runtimes(templates_by_name.values())
    nodes_by_name = {
        workflow_node["name"]: workflow_node
        for workflow_node in list((workflow_status.get("nodes") or {}).values())
    }
    attempts_by_step: dict[str, list[Mapping[str, Any]]] = {}

    for workflow_node in nodes_by_name.values():
        if workflow_node.get("type") == "Pod" and workflow_node.get("startedAt"):
            attempts_by_step.setdefault(
                causes.ATTEMPT_NUMBER.sub("", workflow_node["name"]), []
            ).append(workflow_node)

    job_runs: list[AppliedJob] = []
    for step_name, attempt_nodes in attempts_by_step.items():
        attempt_nodes.sort(
            key=lambda workflow_node: causes.parse_attempt_number(workflow_node["name"])
        )
        template = find_template(attempt_nodes[0], templates_by_name)
        if template:
            applied_jobs = [
                *_list_applied_jobs(
                    _substitute_inputs(template, attempt_nodes[0], manifest), training_runtimes
                )
            ]
        else:
            applied_jobs = []

        if not applied_jobs:
            continue

        step_node = nodes_by_name.get(step_name, attempt_nodes[-1])
        if step_node.get("phase") in FULFILLED_PHASES:
            step_phase = step_node["phase"]
        else:
            step_phase = attempt_nodes[-1].get("phase", "Pending")

        # count from the first to the last attempt, because the job continues while its waiting pod
        # is restarted
        start_time_s = min(
            parse_timestamp(workflow_node["startedAt"]) for workflow_node in attempt_nodes
        )
        duration_seconds = max(
            0.0,
            max(find_end_time(workflow_node, workflow_status) for workflow_node in attempt_nodes)
            - start_time_s,
        )
        attempt_messages = [
            str(workflow_node.get("message") or "") for workflow_node in attempt_nodes
        ]
        cause_message = causes.extract_cause(
            causes.find_root_message(str(step_node.get("message") or ""), attempt_messages)
        )
        job_runs += [
            AppliedJob(
                parse_task_path(attempt_nodes[0]),
                job_kind,
                job_replicas,
                step_phase,
                duration_seconds,
                cause_message,
            )
            for job_kind, job_replicas in applied_jobs
        ]

    return job_runs


def list_planned_jobs(workflow_status: Mapping[str, Any], manifest: Manifest) -> list[AppliedJob]:
    """Return the jobs of the manifest whose steps have not started. The field `task` of each job is
    the name of its template."""
    templates_by_name = collect_templates(workflow_status, manifest)
    training_runtimes = pod_requests.list_training_runtimes(templates_by_name.values())
    workflow_nodes = list((workflow_status.get("nodes") or {}).values())
    started_template_ids = {
        id(find_template(workflow_node, templates_by_name))
        for workflow_node in workflow_nodes
        if workflow_node.get("type") != "Skipped"
    }
    return [
        AppliedJob(str(template.get("name")), job_kind, job_replicas)
        for template in templates_by_name.values()
        if id(template) not in started_template_ids
        for job_kind, job_replicas in _list_applied_jobs(template, training_runtimes)
    ]


def _list_applied_jobs(
    template: Manifest, training_runtimes: Mapping[str, list[PodReplicas]]
) -> Iterator[tuple[str, tuple[PodReplicas, ...]]]:
    """Yield the kind and the pods of each job that a template applies, except elastic trainings."""
    for job_kind, job_replicas in pod_requests.list_applied_jobs(template, training_runtimes):
        if all(
            (LAUNCHERS | COORDINATOR_MODULES).isdisjoint(pod_replicas.command)
            for pod_replicas in job_replicas
        ):
            yield job_kind, job_replicas


def _substitute_inputs(
    template: Manifest, workflow_node: Mapping[str, Any], manifest: Manifest
) -> Manifest:
    """Return the template after the tags in the object that it applies, such as a tag for the
    number of workers, were replaced by workflow arguments and node inputs."""
    object_text = pod_requests.read_object_text(template)
    if "{{" not in object_text:
        return template

    input_parameters = (workflow_node.get("inputs") or {}).get("parameters") or []
    workflow_arguments = (manifest["spec"].get("arguments") or {}).get("parameters") or []

    values_by_tag: dict[str, str | None] = {
        f"{tag_prefix}.parameters.{parameter['name']}": str(parameter["value"])
        for tag_prefix, parameters in (
            ("workflow", workflow_arguments),
            ("inputs", input_parameters),
        )
        for parameter in parameters
        if parameter.get("value") is not None
    }

    try:
        return {
            **template,
            "resource": {
                **template["resource"],
                "manifest": substitute(object_text, values_by_tag),
            },
        }
    # if the value of a tag is missing, keep all tags; a number that contains a tag then counts as
    # unknown
    except TemplateError:
        return template
