"""Keys of a run's artifacts in the object store, `WORKFLOW/TASK/ARTIFACT`.

A run that reuses artifacts does not copy them: its workflow parameter `cached` (CACHED) has their
location for each task.
"""

DATASET = "dataset"
MODEL = "model"
CHECKPOINTS = "checkpoints"
LEDGER = "checkpoints/ledger"
ORIGIN = "origin.json"  # file of a release with its provenance, for `rekindle reproduce`
CURVE = "curve.json"  # file of a trained model with the exact loss of each step
# workflow parameter, a JSON object: task → its cached outputs, and in `at` the RUN/TASK that wrote
# them ("": not cached, so the task runs)
CACHED = "cached"
# extra input of a step's template, with the name of the task; the hyphen distinguishes this input
# from the step's own fields
TASK = "task-name"
AGAIN = "-again"  # suffix of the name of a task that repeats another task
# output of `prepare`: the value of CACHED, extended by the trainings whose models `prepare` has
# found in the cache
REUSED_MODELS = "reused_models"
FREE_BYTES = "x-rekindle-free-bytes"  # header of the embedded object store's HeadBucket response
# field of the JSON in `cached`: "yes" if tasks may look up the cache when they start
REUSE = "reuse"


def key(task: str, artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """Return the key of an artifact; by default with the template tag for the current workflow."""
    return f"{workflow}/{task}/{artifact}"


def cached_name(task: str) -> str:
    """Return the key of a task in the parameter CACHED, in a form that needs no quoting in a
    JSONPath."""
    return task.replace("-", "_")


def cached(task: str, field: str = "at") -> str:
    """Return the Argo expression for a field of a task in the parameter CACHED."""
    return f"jsonpath(workflow.parameters.{CACHED}, '$.{cached_name(task)}.{field}')"


def cached_key(task: str, artifact: str) -> str:
    """Return a template tag for the key of an artifact: in the cached run if the task is cached,
    otherwise in this run."""
    location = cached(task)
    return f"{{{{={location} == '' ? workflow.name + '/{task}' : {location}}}}}/{artifact}"


def reuse() -> str:
    """Return a template tag whose value is `yes`, or `no` if the run must not use the cache."""
    return f"{{{{=jsonpath(workflow.parameters.{CACHED}, '$.{REUSE}')}}}}"
