"""Keys of a run's artifacts in the object store, `WORKFLOW/TASK/ARTIFACT`.

Reused artifacts are not copied to the keys of a new run. Instead, the workflow parameter `cached`
(CACHED_PARAMETER) contains the location of the reused artifacts of each task.
"""

DATASET = "dataset"
MODEL = "model"
CHECKPOINTS_NAME = "checkpoints"
LEDGER_KEY = "checkpoints/ledger"
# provenance of a release, for `rekindle reproduce`
ORIGIN = "origin.json"
# exact loss of each step of a trained model
CURVE = "curve.json"
# workflow parameter, a JSON object with the cached outputs of each task; its field `at` is the
# RUN/TASK that wrote them ("": not cached, so the task runs)
CACHED_PARAMETER = "cached"
# additional input of a step's template, which contains the task's name; no field of the step can be
# called `task-name`, because of the hyphen
TASK_PARAMETER = "task-name"
# suffix of the name of a task that repeats another task
AGAIN_SUFFIX = "-again"
# output of `prepare`: the value of the parameter `cached`, extended by the trainings whose models
# `prepare` has found in the cache
REUSED_MODELS = "reused_models"
# object below RUN/TASK that contains the reason why the cache key does not cover all code that the
# task has loaded; no later run reuses the outputs of such a task
UNCOVERED_CODE = "uncovered"
# header in the embedded object store's response to HeadBucket: free bytes on its disk
FREE_BYTES_HEADER = "x-rekindle-free-bytes"
# field of the parameter `cached`: "yes" if tasks may look up their results in the cache when they
# start
REUSE_FIELD = "reuse"


def key(task_name: str, artifact_name: str, workflow_name: str = "{{workflow.name}}") -> str:
    """Return the key of an artifact in the object store. By default, the key begins with the
    template tag of the current workflow's name."""
    return f"{workflow_name}/{task_name}/{artifact_name}"


def cached_name(task_name: str) -> str:
    """Return the key of a task in the parameter `cached`. The returned key contains no hyphen, so
    it needs no quotes in a JSONPath."""
    return task_name.replace("-", "_")


def cached_expression(task_name: str, field_name: str = "at") -> str:
    """Return the Argo expression that reads a field of a task from the parameter `cached`."""
    return (
        f"jsonpath(workflow.parameters.{CACHED_PARAMETER},"
        f" '$.{cached_name(task_name)}.{field_name}')"
    )


def cached_key(task_name: str, artifact_name: str) -> str:
    """Return a template tag that Argo replaces by the key of an artifact: the key in the cached run
    if the task is cached, else the key in this run."""
    cached_location = cached_expression(task_name)
    return (
        f"{{{{={cached_location} == '' ? workflow.name + '/{task_name}' :"
        f" {cached_location}}}}}/{artifact_name}"
    )


def reuse_tag() -> str:
    """Return a template tag that Argo replaces by `yes`, or by `no` if the run must not use the
    cache."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED_PARAMETER}, '$.{REUSE_FIELD}')}}}}"
