"""A worker process: settings that must precede the import of torch, then the training loop."""

import os

from rekindle.training.launch.signals import on_sigterm
from rekindle.training.spec import TrainingSpec


def work(spec: TrainingSpec) -> None:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits with 143
    after SIGTERM."""
    # cuBLAS reads this variable when it starts; without it, matrix products on a GPU are not
    # reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # called before the import of torch, which takes seconds: without a handler, PID 1 ignores
    # SIGTERM
    leaving = on_sigterm()
    from rekindle.training.loop import train

    train(spec, leaving)
