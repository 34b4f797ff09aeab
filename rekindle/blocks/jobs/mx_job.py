"""MXNet, which is refused: nothing runs an MXJob any more."""

from typing import Any, NoReturn

from rekindle.errors import ConfigError


def mx_job(name: str, *_: Any) -> NoReturn:
    """Raises ConfigError. Source: kubeflow/training-operator pull request 2150, release 1.9."""
    raise ConfigError(
        f"MXJob {name}: the training operator serves no MXJob since release 1.9, as MXNet itself has been retired. "
        "Train with PyTorchJob or another of its kinds, or as a plain Job."
    )
