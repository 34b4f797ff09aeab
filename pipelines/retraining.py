"""The same pipeline every week by itself: a WorkflowTemplate, and a CronWorkflow that runs it.

rekindle render configs/demo.yaml --kind template | kubectl apply -f -
rekindle render configs/demo.yaml --kind cron | kubectl apply -f -
"""

from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from pipelines import crontab
from steps.workload import Section

if TYPE_CHECKING:
    from hera.workflows import CronWorkflow, WorkflowTemplate

    from pipelines.config import Config


class ScheduleConfig(Section):
    """When the pipeline runs by itself."""

    cron: str = Field("0 3 * * 1", description="minute, hour, day of the month, month, day of the week (0 is Sunday)")
    timezone: str = Field("UTC", description="of `cron`; daylight saving may skip or double a run")
    deadline_minutes: int = Field(60, ge=1, description="a run that was missed is made up for this long")
    keep_succeeded: int = Field(3, ge=0, description="finished runs kept in the cluster")
    keep_failed: int = Field(3, ge=0, description="failed runs kept in the cluster")
    suspend: bool = Field(False, description="do not run")

    @field_validator("cron")
    @classmethod
    def _cron(cls, text: str) -> str:
        if text.startswith(("@", "TZ=", "CRON_TZ=")):
            raise ValueError("it must have five fields; the time zone is schedule.timezone")
        if why := crontab.wrong(text):
            raise ValueError(why)
        return text

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, name: str) -> str:
        if why := crontab.wrong_zone(name):
            raise ValueError(why)
        return name


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
