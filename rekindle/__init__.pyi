from rekindle.attached.huggingface import TrainerCallback
from rekindle.attached.lightning import LightningCallback
from rekindle.attached.program import AttachedProgram, attach
from rekindle.blocks.manifest.config import Config, Loaded, load_config
from rekindle.blocks.manifest.render import check_golden, manifest_sha256, render_manifest, to_yaml
from rekindle.errors import (
    ConfigError,
    Conflict,
    DataError,
    RekindleError,
    StorageError,
    TrackingError,
)
from rekindle.families import Fitted
from rekindle.gate import Difference, Evaluation, Gate, Metric
from rekindle.program.config import ProgramConfig
from rekindle.release.bootstrap import paired_bootstrap
from rekindle.release.examples import Examples
from rekindle.sections import Section
from rekindle.step import Artifact, Reuse, StepInputs, StepOutputs
from rekindle.storage import NotFound, Store
from rekindle.workload import (
    DataConfig,
    Dataset,
    Example,
    Predictor,
    Prepared,
    Refreshed,
    Workload,
    record_dataset,
)

__all__ = [
    "Artifact",
    "AttachedProgram",
    "Config",
    "ConfigError",
    "Conflict",
    "DataConfig",
    "DataError",
    "Dataset",
    "Difference",
    "Evaluation",
    "Example",
    "Examples",
    "Fitted",
    "Gate",
    "LightningCallback",
    "Loaded",
    "Metric",
    "NotFound",
    "Predictor",
    "Prepared",
    "ProgramConfig",
    "Refreshed",
    "RekindleError",
    "Reuse",
    "Section",
    "StepInputs",
    "StepOutputs",
    "StorageError",
    "Store",
    "TrackingError",
    "TrainerCallback",
    "Workload",
    "attach",
    "check_golden",
    "load_config",
    "manifest_sha256",
    "paired_bootstrap",
    "record_dataset",
    "render_manifest",
    "to_yaml",
]
