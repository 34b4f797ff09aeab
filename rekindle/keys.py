"""Where the artifacts of a run are in the object store: `WORKFLOW/ARTIFACT`."""

DATASET, MODEL, CHECKPOINTS, LEDGER = "dataset", "model", "checkpoints", "checkpoints/ledger"


def key(artifact: str, workflow: str = "{{workflow.name}}") -> str:
    """The key of an artifact; without a name that of the workflow which Argo runs."""
    return f"{workflow}/{artifact}"
