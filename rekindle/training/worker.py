"""The main function of a worker process: prepares the process before torch is imported, then
trains."""

import os
from collections.abc import Callable

from rekindle.training.launch.signals import install_sigterm_handler
from rekindle.training.spec import TrainingSpec


def run_worker(training_spec: TrainingSpec, find_uncovered_code: Callable[[], str] = str) -> None:
    """Train until the model is in the object store. `find_uncovered_code` is described at
    `loop.train`.

    Raises ConfigError, DataError, and after SIGTERM SystemExit(143).
    """
    # cuBLAS reads this variable when it starts; without it, matrix products on a GPU are not
    # reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # install the handler before the import of torch, which takes seconds, because without a
    # handler, PID 1 ignores SIGTERM
    leaving_event = install_sigterm_handler()
    from rekindle.training.loop import train

    train(training_spec, leaving_event, find_uncovered_code)
