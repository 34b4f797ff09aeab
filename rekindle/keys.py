"""Where the artifacts of a run are in the object store: `WORKFLOW/TASK/ARTIFACT`, so that no two tasks meet.

What an earlier run left stays where it is: the workflow parameter CACHED says of which tasks, and where.
"""

DATASET, MODEL, CHECKPOINTS, LEDGER = "dataset", "model", "checkpoints", "checkpoints/ledger"
CACHED = "cached"  # JSON: by task its outputs, and as `at` the run and task that left them ("": none, so it runs)
REUSE = "reuse"  # in the same JSON: whether tasks may look for them when they begin


def key(task: str, artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """The key of what `task` leaves as `artifact`; without a name of the workflow which Argo runs."""
    return f"{workflow}/{task}/{artifact}"


def cached_name(task: str) -> str:
    """How CACHED calls a task: a name that needs no brackets in a path."""
    return task.replace("-", "_")


def cached(task: str, field: str = "at") -> str:
    """An expression of Argo: what CACHED says of a task."""
    return f"jsonpath(workflow.parameters.{CACHED}, '$.{cached_name(task)}.{field}')"


def cached_key(task: str, artifact: str) -> str:
    """`key` of a task that an earlier run may stand for, as a tag."""
    at = cached(task)
    return f"{{{{={at} == '' ? workflow.name + '/{task}' : {at}}}}}/{artifact}"


def reuse() -> str:
    """A tag: yes, or no for a run that computes everything."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED}, '$.{REUSE}')}}}}"
