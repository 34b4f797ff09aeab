"""Rekindle: Argo Workflows, written with Hera, that train PyTorch models on preemptible nodes
without losing work.

The names in PUBLIC_NAMES are the public API (docs/api.md). `import rekindle` does not import the
public names; each name is imported on its first use.
"""

from argolocal import lazy_exports
from argolocal.common import program

# the public names of each module; __init__.pyi lists them for type checkers
PUBLIC_NAMES = {
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
    "families": ("Fitted",),
    "program.config": ("ProgramConfig",),
    "attached.program": ("attach", "AttachedProgram"),
    "attached.huggingface": ("TrainerCallback",),
    "attached.lightning": ("LightningCallback",),
    "sections": ("Section",),
    "release.bootstrap": ("paired_bootstrap",),
    "release.examples": ("Examples",),
    "gate": ("Metric", "Gate", "Evaluation", "Difference"),
    "blocks.manifest.config": ("load_config", "Loaded", "Config"),
    "blocks.manifest.render": ("check_golden", "render_manifest", "manifest_sha256", "to_yaml"),
    "storage": ("Store", "NotFound"),
    "errors": (
        "RekindleError",
        "ConfigError",
        "DataError",
        "StorageError",
        "TrackingError",
        "Conflict",
    ),
}
__all__, __getattr__, __dir__ = lazy_exports(__name__, PUBLIC_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
program.set_program("rekindle", "rekindle.local.cluster:LocalCluster")
