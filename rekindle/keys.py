"""Keys of a run's artifacts in the object store, `WORKFLOW/TASK/ARTIFACT`.

Reused artifacts are not copied: the workflow parameter `cached` (CACHED) contains their location
for each task.
"""

DATASET = "dataset"
MODEL = "model"
CHECKPOINTS = "checkpoints"
LEDGER = "checkpoints/ledger"
ORIGIN = "origin.json"  # provenance of a release, for `rekindle reproduce`
CURVE = "curve.json"  # exact loss of each step of a trained model
# workflow parameter, a JSON object with the cached outputs of each task; its field `at` is the
# RUN/TASK that wrote them ("": not cached, so the task runs)
CACHED = "cached"
# additional input of a step's template: the task's name; no field of the step can have this name,
# because of the hyphen
TASK = "task-name"
AGAIN = "-again"  # suffix of the name of a task that repeats another task
# output of `prepare`: the value of CACHED, plus the trainings whose models `prepare` has found in
# the cache
REUSED_MODELS = "reused_models"
# header in the response of the embedded object store to HeadBucket
FREE_BYTES = "x-rekindle-free-bytes"
# field of the JSON in `cached`: "yes" if tasks may look up the cache when they start
REUSE = "reuse"


def key(task: str, artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """Return the key of an artifact. By default, it begins with the template tag for the current
    workflow."""
    return f"{workflow}/{task}/{artifact}"


def cached_name(task: str) -> str:
    """Convert a task's name to its key in the parameter CACHED, which needs no quotes in a
    JSONPath."""
    return task.replace("-", "_")


def cached(task: str, field: str = "at") -> str:
    """Return the Argo expression that reads a field of a task from the parameter CACHED."""
    return f"jsonpath(workflow.parameters.{CACHED}, '$.{cached_name(task)}.{field}')"


def cached_key(task: str, artifact: str) -> str:
    """Return a template tag for the key of an artifact: that of the cached run if the task is
    cached, else that of this run."""
    location = cached(task)
    return f"{{{{={location} == '' ? workflow.name + '/{task}' : {location}}}}}/{artifact}"


def reuse() -> str:
    """Return a template tag that Argo replaces by `yes`, or by `no` if the run must not use the
    cache."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED}, '$.{REUSE}')}}}}"
