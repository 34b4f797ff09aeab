"""The Kubernetes jobs that the steps of a run apply, such as the job of `blocks.job`: their pods,
time and outcome.

Elastic trainings are left out: their ledger has the time of each worker.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common import causes
from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.allowed_values import FULFILLED
from argolocal.manifest.types import Manifest
from argolocal.view.summary import timestamp
from rekindle.kubernetes_names import COORDINATORS, LAUNCHERS
from rekindle.training.cost import pod_requests
from rekindle.training.cost.pod_requests import Replicas
from rekindle.training.cost.prices import Prices


@dataclass(frozen=True)
class JobRun:
    """A job that a step has applied. The duration of the job is that of the step, which waits for
    the job."""

    task: str
    kind: str
    replicas: tuple[Replicas, ...]
    phase: str = "Waiting"
    seconds: float = 0.0
    message: str = ""

    def cost(self, prices: Prices) -> float:
        """Return the cost of all pods. Raises ConfigError if a pod has no price."""
        return sum(item.count * prices.pod_cost(item.pod, self.seconds) for item in self.replicas)


def collect_templates(status: Mapping[str, Any], manifest: Manifest) -> dict[str, Manifest]:
    """Return the templates of a run: the templates of its manifest by name, and the templates of
    WorkflowTemplates by SCOPE/OBJECT/NAME, where SCOPE is `namespaced` or `cluster`."""
    stored = {**(manifest.get("storedTemplates") or {}), **(status.get("storedTemplates") or {})}
    return stored | {
        item["name"]: item for item in manifest["spec"].get("templates") or [] if "name" in item
    }


def find_template(node: Mapping[str, Any], templates: Mapping[str, Manifest]) -> Manifest | None:
    """Return the template of a node, which may belong to a WorkflowTemplate."""
    name = str(node.get("templateName") or "")
    scope = str(node.get("templateScope") or "")
    reference = node.get("templateRef")
    if reference:
        scope = (
            f"{'cluster' if reference.get('clusterScope') else 'namespaced'}/{reference['name']}"
        )
        name = reference["template"]
    is_stored = scope.startswith(("namespaced/", "cluster/"))
    return templates.get(f"{scope}/{name}" if is_stored else name, templates.get(name))


def parse_task_path(node: Mapping[str, Any]) -> str:
    """Return the path of the node's task, without the indices of loop items and attempts."""
    return node["name"].partition(".")[2].partition("(")[0] or node["name"]


def find_end_time(node: Mapping[str, Any], status: Mapping[str, Any]) -> float:
    """Return the end time of a node. For a node that has not ended, return the end of the run, or
    the current time."""
    end = node.get("finishedAt") or status.get("finishedAt")
    if end:
        return timestamp(end)
    return time.time()


def list_job_runs(status: Mapping[str, Any], manifest: Manifest) -> list[JobRun]:
    """Return the jobs that the steps of a run have applied."""
    templates = collect_templates(status, manifest)
    runtimes = pod_requests.list_training_runtimes(templates.values())
    nodes = {node["name"]: node for node in list((status.get("nodes") or {}).values())}
    attempts: dict[str, list[Mapping[str, Any]]] = {}

    for node in nodes.values():
        if node.get("type") == "Pod" and node.get("startedAt"):
            attempts.setdefault(causes.ATTEMPT.sub("", node["name"]), []).append(node)

    result: list[JobRun] = []
    for name, found in attempts.items():
        found.sort(key=lambda node: causes.attempt_number(node["name"]))
        template = find_template(found[0], templates)
        if template:
            jobs = [*_list_applied_jobs(_substitute_inputs(template, found[0], manifest), runtimes)]
        else:
            jobs = []

        if not jobs:
            continue

        step = nodes.get(name, found[-1])
        if step.get("phase") in FULFILLED:
            phase = step["phase"]
        else:
            phase = found[-1].get("phase", "Pending")

        # from the first to the last attempt: the job continues while its waiting pod is restarted
        start = min(timestamp(node["startedAt"]) for node in found)
        seconds = max(0.0, max(find_end_time(node, status) for node in found) - start)
        messages = [str(node.get("message") or "") for node in found]
        message = causes.extract_cause(
            causes.find_root_message(str(step.get("message") or ""), messages)
        )
        result += [
            JobRun(parse_task_path(found[0]), kind, items, phase, seconds, message)
            for kind, items in jobs
        ]

    return result


def list_planned_jobs(status: Mapping[str, Any], manifest: Manifest) -> list[JobRun]:
    """Return the jobs of the manifest whose steps have not started. The field `task` of each job is
    the name of its template."""
    templates = collect_templates(status, manifest)
    runtimes = pod_requests.list_training_runtimes(templates.values())
    nodes = list((status.get("nodes") or {}).values())
    started = {
        id(find_template(node, templates)) for node in nodes if node.get("type") != "Skipped"
    }
    return [
        JobRun(str(template.get("name")), kind, items)
        for template in templates.values()
        if id(template) not in started
        for kind, items in _list_applied_jobs(template, runtimes)
    ]


def _list_applied_jobs(
    template: Manifest, runtimes: Mapping[str, list[Replicas]]
) -> Iterator[tuple[str, tuple[Replicas, ...]]]:
    """Yield the kind and the pods of each job that a template applies, except elastic trainings."""
    for kind, items in pod_requests.list_applied_jobs(template, runtimes):
        if all((LAUNCHERS | COORDINATORS).isdisjoint(item.command) for item in items):
            yield kind, items


def _substitute_inputs(template: Manifest, node: Mapping[str, Any], manifest: Manifest) -> Manifest:
    """Return the template after the tags in the object that it applies, such as a tag for the
    number of workers, were replaced by workflow arguments and node inputs."""
    text = pod_requests.read_object_text(template)
    if "{{" not in text:
        return template

    inputs = (node.get("inputs") or {}).get("parameters") or []
    arguments = (manifest["spec"].get("arguments") or {}).get("parameters") or []

    scope: dict[str, str | None] = {
        f"{prefix}.parameters.{item['name']}": str(item["value"])
        for prefix, items in (("workflow", arguments), ("inputs", inputs))
        for item in items
        if item.get("value") is not None
    }

    try:
        return {
            **template,
            "resource": {**template["resource"], "manifest": substitute(text, scope)},
        }
    # the value of a tag is missing, so all tags stay, and a number that contains a tag counts as
    # unknown
    except TemplateError:
        return template
