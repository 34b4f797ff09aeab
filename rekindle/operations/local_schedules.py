"""The schedules of this machine: store, delete and start the CronWorkflow of a pipeline.

    changes = store_schedule(cluster, template, cron)

The server of REKINDLE_HOME starts the scheduled runs (argolocal/server/cron).
"""

from typing import Any

from argolocal.errors import suggest_similar
from argolocal.manifest.types import Object
from argolocal.server.cron.controller import PATH_ANNOTATION, build_workflow
from argolocal.server.objects import Objects
from rekindle.cluster.workflows import describe_differences
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster

# history limit of a CronWorkflow: high enough that only Rekindle's own retention removes old runs,
# which also removes their artifacts
KEPT_RUNS = 1_000_000


def prepare_cron(cron: Object, has_deadline: bool) -> Object:
    """Return the CronWorkflow of a config, adapted to this machine. `has_deadline` is True if the
    config sets schedule.deadline_minutes. Without a deadline, a machine that was off starts the
    newest missed run as soon as it is on again."""
    spec = {
        **cron["spec"],
        "successfulJobsHistoryLimit": KEPT_RUNS,
        "failedJobsHistoryLimit": KEPT_RUNS,
    }
    if not has_deadline:
        spec.pop("startingDeadlineSeconds", None)
    return {**cron, "spec": spec}


def store_schedule(cluster: LocalCluster, template: Object, cron: Object) -> list[str]:
    """Store a WorkflowTemplate and the CronWorkflow that runs it. Return the changed fields as
    lines of text, as `kubectl apply` prints them. Raises ConfigError."""
    objects = Objects(cluster)
    annotations = {**(cron["metadata"].get("annotations") or {}), PATH_ANNOTATION: cluster.path}
    cron = {**cron, "metadata": {**cron["metadata"], "annotations": annotations}}
    previous = objects.find("CronWorkflow", cron["metadata"]["name"])
    changes = [objects.apply_and_describe(schedule_object) for schedule_object in (template, cron)]
    if previous:
        old_times = _select_times(previous["spec"])
        new_times = _select_times(cron["spec"])
        changes += describe_differences(old_times, new_times, "spec")
    return changes


def _select_times(spec: Object) -> Object:
    """Return the fields of a CronWorkflow that say when it runs."""
    return {field: spec.get(field) for field in ("schedules", "timezone", "suspend")}


def set_suspended(cluster: LocalCluster, schedule_name: str, is_suspended: bool) -> None:
    """Suspend or resume a schedule. Raises ConfigError if the schedule does not exist."""

    def change(cron: Object) -> None:
        cron["spec"]["suspend"] = is_suspended

    Objects(cluster).update("CronWorkflow", schedule_name, change)


def find_schedule(cluster: LocalCluster, schedule_name: str) -> Object:
    """Return the CronWorkflow of a schedule. Raises ConfigError if the schedule does not exist."""
    objects = Objects(cluster)
    cron = objects.find("CronWorkflow", schedule_name)
    if cron is None:
        schedule_names = set(objects.names("CronWorkflow"))
        raise ConfigError(
            f"the schedule {schedule_name} does not exist on this machine: `rekindle schedule"
            f" list` lists all schedules.{suggest_similar(schedule_name, schedule_names)}"
        )
    return cron


def delete_schedule(cluster: LocalCluster, schedule_name: str) -> None:
    """Delete a schedule and its WorkflowTemplate, but not its runs. Raises ConfigError if the
    schedule does not exist."""
    spec = find_schedule(cluster, schedule_name)["spec"].get("workflowSpec") or {}
    objects = Objects(cluster)
    objects.delete("CronWorkflow", schedule_name)
    has_template = (spec.get("workflowTemplateRef") or {}).get("name") == schedule_name
    if has_template and objects.find("WorkflowTemplate", schedule_name):
        objects.delete("WorkflowTemplate", schedule_name)


def build_run(cluster: LocalCluster, schedule_name: str, unix_seconds: int) -> dict[str, Any]:
    """Return the Workflow that a schedule would start at a time in Unix seconds. Raises ConfigError
    if the schedule does not exist."""
    workflow = build_workflow(find_schedule(cluster, schedule_name), unix_seconds)
    metadata = workflow["metadata"]
    # a run that a user starts does not belong to the schedule, so the schedule's concurrency policy
    # and history limits ignore it
    del metadata["ownerReferences"]
    del metadata["name"]
    return {**workflow, "metadata": {**metadata, "generateName": f"{schedule_name}-"}}
