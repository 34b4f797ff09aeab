"""Keys of a run's artifacts in the object store, `WORKFLOW/TASK/ARTIFACT`.

Reused artifacts are not copied: the workflow parameter `cached_expression` (CACHED) contains their
location for each task.
"""

DATASET = "dataset"
MODEL = "model"
CHECKPOINTS_NAME = "checkpoints"
LEDGER_KEY = "checkpoints/ledger"
ORIGIN = "origin.json"  # provenance of a release, for `rekindle reproduce`
CURVE = "curve.json"  # exact loss of each step of a trained model
# workflow parameter, a JSON object with the cached outputs of each task; its field `at` is the
# RUN/TASK that wrote them ("": not cached, so the task runs)
CACHED_PARAMETER = "cached"
# additional input of a step's template: the task's name; no field of the step can have this name,
# because of the hyphen
TASK_PARAMETER = "task-name"
AGAIN_SUFFIX = "-again"  # suffix of the name of a task that repeats another task
# output of `prepare`: the value of CACHED, plus the trainings whose models `prepare` has found in
# the cache
REUSED_MODELS = "reused_models"
# header in the response of the embedded object store to HeadBucket
FREE_BYTES_HEADER = "x-rekindle-free-bytes"
# field of the JSON in `cached_expression`: "yes" if tasks may look up the cache when they start
REUSE_ROW = "reuse"


def key(task_name: str, artifact_name: str, workflow_name: str = "{{workflow.name}}") -> str:
    """Return the key of an artifact. By default, it begins with the template tag for the current
    workflow."""
    return f"{workflow_name}/{task_name}/{artifact_name}"


def cached_name(task_name: str) -> str:
    """Convert a task's name to its key in the parameter CACHED, which needs no quotes in a
    JSONPath."""
    return task_name.replace("-", "_")


def cached_expression(task_name: str, field_name: str = "at") -> str:
    """Return the Argo expression that reads a field of a task from the parameter CACHED."""
    return (
        f"jsonpath(workflow.parameters.{CACHED_PARAMETER},"
        f" '$.{cached_name(task_name)}.{field_name}')"
    )


def cached_key(task_name: str, artifact_name: str) -> str:
    """Return a template tag for the key of an artifact: that of the cached run if the task is
    cached, else that of this run."""
    cached_location = cached_expression(task_name)
    return (
        f"{{{{={cached_location} == '' ? workflow.name + '/{task_name}' :"
        f" {cached_location}}}}}/{artifact_name}"
    )


def reuse_tag() -> str:
    """Return a template tag that Argo replaces by `yes`, or by `no` if the run must not use the
    cache."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED_PARAMETER}, '$.{REUSE_ROW}')}}}}"
