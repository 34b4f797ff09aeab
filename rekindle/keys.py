"""Keys of a run's artifacts in the object store, `WORKFLOW/TASK/ARTIFACT`, and a header of the
embedded store.

Cached artifacts are not copied: the workflow parameter `cached` maps tasks to the location of their
artifacts.
"""

DATASET = "dataset"
MODEL = "model"
CHECKPOINTS = "checkpoints"
LEDGER = "checkpoints/ledger"
ORIGIN = "origin.json"  # file of a release: what `rekindle reproduce` needs
CURVE = "curve.json"  # file of a trained model: the exact losses of its steps
# JSON: task → its cached outputs; `at`: RUN/TASK that wrote them ("": not cached, so the task runs)
CACHED = "cached"
# an input of a step's template; fields of steps cannot have this name, because it has a hyphen
TASK = "task-name"
AGAIN = "-again"  # end of the name of a task that repeats another task
# output of `prepare`: CACHED with the trainings whose models it has found
REUSED_MODELS = "reused_models"
FREE_BYTES = "x-rekindle-free-bytes"  # header of the embedded object store's answer to HeadBucket
# field of the JSON in `cached`: "yes" if tasks may look up the cache when they start
REUSE = "reuse"


def key(task: str, artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """Return the key of an artifact, by default of the workflow that Argo runs."""
    return f"{workflow}/{task}/{artifact}"


def cached_name(task: str) -> str:
    """Return the task's key in the `cached` parameter (valid in a JSONPath without quoting)."""
    return task.replace("-", "_")


def cached(task: str, field: str = "at") -> str:
    """Return the Argo expression for a field of a task in the `cached` parameter."""
    return f"jsonpath(workflow.parameters.{CACHED}, '$.{cached_name(task)}.{field}')"


def cached_key(task: str, artifact: str) -> str:
    """Return a template tag for the key of an artifact: the cached location, else the location in
    this run."""
    location = cached(task)
    return f"{{{{={location} == '' ? workflow.name + '/{task}' : {location}}}}}/{artifact}"


def reuse() -> str:
    """Return a template tag with the value `yes`, or `no` if the run computes everything."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED}, '$.{REUSE}')}}}}"
