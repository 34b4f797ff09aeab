"""Let the tasks after `prepare` depend on new data, in a scheduled run with a moving window
(docs/time.md)."""

import re
from typing import Any

from hera.workflows import Suspend, Task

from rekindle.blocks.wiring import Block

TASK_NAME = "new-data"


def require_new_data(pipeline: Any, data: Block) -> None:
    """Omit all tasks that depend on `data` if its source, the code and the config have not changed
    since the last run.

    Argo also runs the successors of a skipped task, but not the successors of an omitted task: so
    the direct successors of `data` require the success of one more task, which starts no pod.
    """
    scope = pipeline.scope()

    successors = [
        task
        for task in scope.dag.tasks
        if isinstance(task, Task) and data.name in _predecessors(task)
    ]
    if not successors or data not in scope.dag.tasks:
        return  # `data` is in a group, whose successors do not depend on its tasks

    arguments: dict[str, Any] = data.arguments  # pyright: ignore[reportAssignmentType]
    arguments["skip"] = "true"
    template = Suspend(name=pipeline.template_name(TASK_NAME), duration="0")
    condition = {"when": data.outputs.unchanged == ""}
    name = pipeline.add(pipeline.name("", TASK_NAME), template, {}, condition, [data.name]).name

    for task in successors:
        depends = task.depends or " && ".join(task.dependencies or [])
        task.dependencies = None
        if depends == data.name:
            required = ""
        else:
            if "||" in depends:
                required = f"({depends}) && "
            else:
                required = f"{depends} && "

        task.depends = f"{required}{name}.Succeeded"


def _predecessors(task: Task) -> list[str]:
    return re.findall(r"[\w-]+", task.depends or " ".join(task.dependencies or []))
