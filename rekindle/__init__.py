"""Rekindle: Argo Workflows, written with Hera, that train PyTorch models on preemptible nodes and lose nothing.

The names below are the public API (docs/api.md). `import rekindle` loads none of them: each is imported on first use.
"""

from argolocal import exports
from argolocal.common import program

NAMES = {  # module → its public names; __init__.pyi says the same to type checkers
    "step": ("Artifact", "StepInputs", "StepOutputs", "Reuse"),
    "workload": (
        "Workload",
        "DataConfig",
        "Prepared",
        "Refreshed",
        "record_dataset",
        "Dataset",
        "Predictor",
        "Example",
    ),
    "sections": ("Section",),
    "release.bootstrap": ("paired_bootstrap",),
    "release.examples": ("Examples",),
    "gate": ("Metric", "Gate", "Evaluation", "Difference"),
    "blocks.manifest.config": ("load_config", "Loaded", "Config"),
    "blocks.manifest.render": ("check_golden", "render_manifest", "manifest_sha256", "to_yaml"),
    "storage": ("Store", "NotFound"),
    "errors": ("RekindleError", "ConfigError", "DataError", "StorageError", "TrackingError", "Conflict"),
}
__all__, __getattr__, __dir__ = exports(__name__, NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
program.use("rekindle", "rekindle.local.cluster:LocalCluster")
