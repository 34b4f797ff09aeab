"""Skip the training of a scheduled run whose moving window has no new data (docs/time.md)."""

from typing import Any

from hera.workflows import Suspend, Task

from rekindle.blocks.dag_scope import get_dependencies, set_dependencies
from rekindle.blocks.dependencies import Dependencies, after_all
from rekindle.blocks.wiring import Block

TASK_NAME = "new-data"


# `pipeline` has the type Pipeline, which cannot be imported here, because the module of Pipeline
# imports this module
def require_new_data(pipeline: Any, data_block: Block) -> None:
    """Let Argo omit all tasks that depend on `data_block` if the data source, the code and the
    config are unchanged since the last run.

    Argo runs the successors of a skipped task, but not the successors that require
    `TASK.Succeeded`. The direct successors of `data_block` require the success of an added Suspend
    task, which needs no pod, so that Argo omits them if this task is skipped.
    """
    dag_scope = pipeline.current_scope()

    successors = [
        task
        for task in dag_scope.dag.tasks
        if isinstance(task, Task) and data_block.name in get_dependencies(task).tasks
    ]
    if not successors or data_block not in dag_scope.dag.tasks:
        # no task of this DAG depends on `data_block`, for example because `data_block` is in a
        # group (a nested DAG)
        return

    task_arguments: dict[str, Any] = data_block.arguments  # pyright: ignore[reportAssignmentType]
    task_arguments["skip"] = "true"
    suspend_template = Suspend(name=pipeline.make_template_name(TASK_NAME), duration="0")
    skip_condition = {"when": data_block.outputs.unchanged == ""}
    added_task = pipeline.add_task(
        pipeline.reserve_name("", TASK_NAME),
        suspend_template,
        {},
        skip_condition,
        [data_block.name],
    ).name

    for task in successors:
        previous_dependencies = get_dependencies(task)
        if previous_dependencies == after_all([data_block.name]):
            previous_dependencies = Dependencies()
        set_dependencies(task, previous_dependencies & after_all([f"{added_task}.Succeeded"]))
