"""Reports the progress of a step that trains in its own pod to Argo, which shows it on its page.

Argo's executor reads the file in ARGO_PROGRESS_FILE, whose content is N/M, every few seconds.
ARGO_PROGRESS_FILE is not set in the pods of jobs, because Argo does not start these pods, and
cannot show their progress.

Source: the documentation of Argo Workflows 4.1, docs/progress.md.
"""

import os
from pathlib import Path

from rekindle.errors import write_stderr

ARGO_PROGRESS_FILE = "ARGO_PROGRESS_FILE"


def write_progress(completed_steps: int, total_steps: int) -> None:
    """Write the progress for Argo. If the progress file cannot be written, print the reason, and do
    not try again."""
    path = os.environ.get(ARGO_PROGRESS_FILE)
    # Argo ignores a progress with N > M
    if not path or not 0 <= completed_steps <= total_steps:
        return
    try:
        Path(path).write_text(f"{completed_steps}/{total_steps}\n")
    except OSError as error:
        disable_progress()
        write_stderr(f"the progress is not shown by Argo: {path}: {error.strerror}")


def disable_progress() -> None:
    """Write no progress from now on, because the training of this process is not the whole step."""
    os.environ.pop(ARGO_PROGRESS_FILE, None)
