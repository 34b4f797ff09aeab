"""The progress that the pod of a step reports, as `N/M` in the file ARGO_PROGRESS_FILE.

    echo 30/100 > $ARGO_PROGRESS_FILE

Source: Argo's workflow/executor/executor.go (monitorProgress) and
pkg/apis/workflow/v1alpha1/progress.go.
"""

import os
import re
import stat
from pathlib import Path

PROGRESS_VARIABLE = "ARGO_PROGRESS_FILE"
# Path of the file in a pod; Argo's path is /var/run/argo/progress. A pod shares the directory /var
# with this machine, so a file in that directory cannot be private to a pod.
PROGRESS_PATH = "/argo/progress"
PROGRESS_ANNOTATION = "workflows.argoproj.io/progress"  # initial progress, in a template's metadata
PROGRESS_PATTERN = re.compile(r"(\d{1,18})/(\d{1,18})", re.ASCII)
MAX_READ_BYTES = 4096


def parse_progress(text: object) -> tuple[int, int] | None:
    """Return N and M of a progress `N/M`; None for an invalid progress."""
    match = PROGRESS_PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match:
        return None
    done = int(match[1])
    total = int(match[2])
    return (done, total) if done <= total and total > 0 else None


def read_progress(path: Path) -> str:
    """Return the progress in the last line of a pod's file; "" if the file is missing or has no
    valid progress."""
    try:
        # the pod may have replaced the file by a link or a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        file_status = os.fstat(descriptor)
        if not stat.S_ISREG(file_status.st_mode):
            return ""
        file_end = os.pread(
            descriptor, MAX_READ_BYTES, max(0, file_status.st_size - MAX_READ_BYTES)
        )
    except OSError:
        return ""
    finally:
        os.close(descriptor)

    last_line = file_end.decode(errors="replace").strip().rpartition("\n")[2].strip()
    return last_line if parse_progress(last_line) else ""


def complete_progress(progress: str) -> str:
    """Return the progress of a pod that has succeeded: M/M."""
    total = progress.partition("/")[2]
    return f"{total}/{total}"
