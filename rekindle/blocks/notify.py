"""The task that sends a notification at the end of a workflow; if it fails, the workflow does not
fail."""

from collections.abc import Mapping

from hera.workflows import DAG, Container, Task
from hera.workflows import models as m

from rekindle.blocks.pod_settings import environment_sources
from rekindle.kubernetes_names import NOTIFY_SECRET
from rekindle.release.watch.notification import NotifyConfig
from rekindle.step import to_text

NOTIFY = "steps.monitoring.notify"


def notification(
    name: str, notify: Container, config: NotifyConfig, inputs: Mapping[str, str]
) -> DAG:
    """Return a DAG with one task, which runs the template `notify` with the fields of `config` and
    with `inputs`.

    The DAG is separate, because the task sets `continueOn`, which Argo does not allow in a DAG with
    `depends`.
    """
    notify.env_from = [
        m.EnvFromSource.model_validate(source) for source in environment_sources(NOTIFY_SECRET)
    ]
    arguments = {field: to_text(value) for field, value in dict(config).items()} | dict(inputs)

    with DAG(name=name) as dag:
        Task(
            name="notify",
            template=notify,
            arguments=arguments,
            continue_on=m.ContinueOn(failed=True, error=True),
        )

    return dag
