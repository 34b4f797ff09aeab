"""The task that tells people how a workflow ended: whatever becomes of it, the workflow ends as it did."""

from collections.abc import Mapping

from hera.workflows import DAG, Container, Task
from hera.workflows import models as m

from rekindle.blocks.pod import environment
from rekindle.notify import SECRET, NotifyConfig
from rekindle.step import to_text

ENDS = ("Succeeded", "Failed", "Errored")  # of the task that it comes after
NOTIFY = "steps.monitoring.notify"


def notification(name: str, notify: Container, config: NotifyConfig, about: Mapping[str, str]) -> DAG:
    """The DAG `name` of a task of the template `notify`, since `continueOn` and `depends` exclude each other in one.

    `about` are inputs of its step beside the config.
    """
    notify.env_from = [m.EnvFromSource.model_validate(source) for source in environment(SECRET)]
    inputs = {field: to_text(value) for field, value in dict(config).items()} | dict(about)
    with DAG(name=name) as dag:
        Task(name="notify", template=notify, arguments=inputs, continue_on=m.ContinueOn(failed=True, error=True))
    return dag
