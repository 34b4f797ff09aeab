"""A pipeline by itself: the CronWorkflow that runs the WorkflowTemplate of the same name.

rekindle render configs/demo.yaml --kind template | kubectl apply -f -
rekindle render configs/demo.yaml --kind cron | kubectl apply -f -
"""

from typing import TYPE_CHECKING

from hera.workflows import CronWorkflow, Parameter
from hera.workflows import models as m

from rekindle.blocks.manifest.provenance import SCHEDULED
from rekindle.blocks.pod import labels

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config


def cron(config: "Config") -> CronWorkflow:
    """The schedule. Its runs are called NAME-UNIXTIME; while one runs, no other begins."""
    schedule = config.schedule
    return CronWorkflow(
        name=config.name,
        namespace=config.cluster.namespace or None,
        labels=labels(config.name),
        schedules=[schedule.cron],
        timezone=schedule.timezone,
        concurrency_policy="Forbid",
        starting_deadline_seconds=60 * schedule.deadline_minutes,
        successful_jobs_history_limit=schedule.keep_succeeded,
        failed_jobs_history_limit=schedule.keep_failed,
        cron_suspend=schedule.suspend or None,
        arguments=[Parameter(name=SCHEDULED, value="{{workflow.scheduledTime}}")],
        workflow_template_ref=m.WorkflowTemplateRef(name=config.name),
    )
