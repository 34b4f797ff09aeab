"""Skip the training of a scheduled run whose moving window has no new data (docs/time.md)."""

from typing import Any

from hera.workflows import Suspend, Task

from rekindle.blocks.dag_scope import dependencies_of, set_dependencies
from rekindle.blocks.dependencies import Dependencies, after_all
from rekindle.blocks.wiring import Block

TASK_NAME = "new-data"


# the parameter `pipeline` has the type Pipeline, whose module imports this module, so it cannot be
# imported here
def require_new_data(pipeline: Any, data: Block) -> None:
    """Let Argo omit all tasks that depend on `data` if the data source, the code and the config are
    unchanged since the last run.

    Argo runs the successors of a skipped task, but not those that require `TASK.Succeeded`. So the
    direct successors of `data` require the success of an added Suspend task, which needs no pod.
    """
    scope = pipeline.current_scope()

    successors = [
        task
        for task in scope.dag.tasks
        if isinstance(task, Task) and data.name in dependencies_of(task).tasks
    ]
    if not successors or data not in scope.dag.tasks:
        return  # no task of this DAG depends on `data`, for example because `data` is in a group

    arguments: dict[str, Any] = data.arguments  # pyright: ignore[reportAssignmentType]
    arguments["skip"] = "true"
    template = Suspend(name=pipeline.template_name(TASK_NAME), duration="0")
    condition = {"when": data.outputs.unchanged == ""}
    name = pipeline.add_task(
        pipeline.reserve_name("", TASK_NAME), template, {}, condition, [data.name]
    ).name

    for task in successors:
        earlier = dependencies_of(task)
        if earlier == after_all([data.name]):
            earlier = Dependencies()
        set_dependencies(task, earlier & after_all([f"{name}.Succeeded"]))
