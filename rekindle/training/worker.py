"""One worker: what must be set before torch is imported, then the training loop."""

import os

from rekindle.training.launch.signals import on_sigterm
from rekindle.training.spec import TrainingSpec


def work(spec: TrainingSpec) -> None:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits 143 after a SIGTERM."""
    # read by cuBLAS when it starts; without it matrix products on a GPU are not reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    leaving = on_sigterm()  # before the import of torch: it takes seconds, in which PID 1 would ignore the signal
    from rekindle.training.loop import train

    train(spec, leaving)
