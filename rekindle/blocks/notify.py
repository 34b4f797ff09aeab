"""The task that sends a notification at the end of a workflow; if this task fails, the workflow
does not fail."""

from collections.abc import Mapping

from hera.workflows import DAG, Container, Task
from hera.workflows import models as m

from rekindle.blocks.pod_settings import environment_sources
from rekindle.kubernetes_names import NOTIFY_SECRET
from rekindle.release.watch.notification import NotifyConfig
from rekindle.step import format_parameter

NOTIFY_STEP = "steps.monitoring.notify"


def build_notification_dag(
    dag_name: str,
    notify_template: Container,
    notify_config: NotifyConfig,
    step_inputs: Mapping[str, str],
) -> DAG:
    """Return a DAG with one task, which runs the template `notify_template` with the fields of
    `notify_config` and with `step_inputs`.

    The notification has its own DAG, because its task sets `continueOn`, which Argo does not allow
    in a DAG with `depends`.
    """
    notify_template.env_from = [
        m.EnvFromSource.model_validate(environment_source)
        for environment_source in environment_sources(NOTIFY_SECRET)
    ]
    task_arguments = {
        field_name: format_parameter(value) for field_name, value in dict(notify_config).items()
    } | dict(step_inputs)

    with DAG(name=dag_name) as dag:
        Task(
            name="notify",
            template=notify_template,
            arguments=task_arguments,
            continue_on=m.ContinueOn(failed=True, error=True),
        )

    return dag
