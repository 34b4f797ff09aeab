"""Where the artifacts of a run are in the object store: `WORKFLOW/TASK/ARTIFACT`, so that no two tasks meet."""

DATASET, MODEL, CHECKPOINTS, LEDGER = "dataset", "model", "checkpoints", "checkpoints/ledger"


def key(task: str, artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """The key of what `task` leaves as `artifact`; without a name of the workflow which Argo runs."""
    return f"{workflow}/{task}/{artifact}"
