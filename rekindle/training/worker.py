"""One worker: everything that must be set before torch is imported, then the training loop."""

import os

from rekindle.training.launch.signals import heed_sigterm
from rekindle.training.spec import TrainingSpec


def work(spec: TrainingSpec) -> None:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits 143 after a SIGTERM."""
    # cuBLAS reads it when it starts; without it a GPU's matrix products are not reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    leaving = heed_sigterm()  # before the import of torch: it takes seconds, and PID 1 would not hear the signal
    from rekindle.training.loop import train

    train(spec, leaving)
