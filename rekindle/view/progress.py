"""Find the progress of a training in the logs of its workers."""

from argolocal.common.wording import format_duration, visible
from argolocal.manifest.allowed_values import FAILED
from argolocal.view.display import LogErrors
from argolocal.view.summary import Step, read_end
from rekindle.program.progress import LOG_LINE
from rekindle.training.metrics import PROGRESS_LINE

MAX_NUMBER = 1e12  # limit for samples per second and seconds


def progress_in(log: str) -> str:
    """Return `step 120/600  loss 0.0213  10 234 samples/s  12 s left` from the newest progress line
    in a log. Without one, return the newest report of a program, or ""."""
    matches = PROGRESS_LINE.findall(log)
    if not matches:
        reports = LOG_LINE.findall(log)
        return visible(reports[-1]) if reports else ""

    step, total, loss, rate, eta, validation = matches[-1]
    parts = [f"step {step}/{total}", f"loss {loss}"]
    if validation:
        parts[-1] += f"  validation {validation}"

    speed = _parse_number(rate)
    if speed is not None:
        parts.append(f"{speed:,.0f} samples/s".replace(",", " "))
    seconds_left = _parse_number(eta)
    if seconds_left is not None:
        parts.append(f"{format_duration(seconds_left)} left")
    return visible("  ".join(parts))


def _parse_number(text: str) -> float | None:
    """Parse a number that a program has written; return None if it is negative, huge or
    malformed."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < MAX_NUMBER else None


class LogProgress(LogErrors):
    """Reads progress and errors from the logs of a step's workers (`WORKFLOW-STEP-worker*.log`)."""

    def of(self, row: Step) -> str:
        if row.phase in FAILED:
            return super().of(row)

        logs = self.logs.glob(f"{self.name}-{row.label}-worker*.log")
        newest_first = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
        return next(filter(None, (progress_in(read_end(path, 4096)) for path in newest_first)), "")
