"""The line that a training prints of its progress, which what shows a run reads."""

import re

PROGRESS = re.compile(
    r"progress step=(\d+)/(\d+) loss=(\S+) samples_per_s=(\S+) eta_s=(\S+)(?: validation_loss=(\S+))?"
)


def progress(
    step: int, total: int, loss: float, samples_per_s: float, eta_s: float, validation_loss: float | None = None
) -> str:
    """The line that a training prints once a second, as PROGRESS matches it."""
    line = f"progress step={step}/{total} loss={loss:.5f} samples_per_s={samples_per_s:.0f} eta_s={eta_s:.0f}"
    return line if validation_loss is None else f"{line} validation_loss={validation_loss:.5f}"
