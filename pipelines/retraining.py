"""The same pipeline every week by itself: a WorkflowTemplate, and a CronWorkflow that runs it.

rekindle render configs/demo.yaml --kind template | kubectl apply -f -
rekindle render configs/demo.yaml --kind cron | kubectl apply -f -
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hera.workflows import CronWorkflow, WorkflowTemplate

    from rekindle.config import Config


def template(config: "Config") -> "WorkflowTemplate":
    """The pipeline under the name of the config, for the schedule and for runs by hand."""
    from hera.workflows import WorkflowTemplate

    from pipelines.training import build

    result = build(config, WorkflowTemplate)
    assert isinstance(result, WorkflowTemplate)
    return result


def cron(config: "Config") -> "CronWorkflow":
    """The schedule. Its runs are called NAME-UNIXTIME; while one runs, no other begins."""
    from hera.workflows import CronWorkflow
    from hera.workflows import models as m

    schedule = config.schedule
    return CronWorkflow(
        name=config.name,
        namespace=config.cluster.namespace or None,
        labels={"app.kubernetes.io/part-of": "rekindle", "app.kubernetes.io/name": config.name},
        schedules=[schedule.cron],
        timezone=schedule.timezone,
        concurrency_policy="Forbid",
        starting_deadline_seconds=60 * schedule.deadline_minutes,
        successful_jobs_history_limit=schedule.keep_succeeded,
        failed_jobs_history_limit=schedule.keep_failed,
        cron_suspend=schedule.suspend or None,
        workflow_template_ref=m.WorkflowTemplateRef(name=config.name),
    )
