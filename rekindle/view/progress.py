"""Find the progress of a training in the logs of its workers."""

from collections.abc import Iterable

from argolocal.common.wording import escape_control_chars, format_duration
from argolocal.manifest.allowed_values import FAILED_PHASES
from argolocal.view.display import LogErrors
from argolocal.view.summary import Step, read_end
from rekindle.program.progress import LOG_LINE_PATTERN
from rekindle.training.metrics import PROGRESS_LINE_PATTERN

# roles of the pods of workers in their names
WORKER_ROLES = ("worker", "node")
LOG_END_BYTES = 4096
# largest valid value of samples per second and of seconds
MAX_NUMBER = 1e12


def choose_progress(log_texts: Iterable[str]) -> str:
    """Return the progress of the worker that is furthest, given the ends of the workers' logs; ""
    without any. The log of a worker that no longer reports may end with an old progress line."""
    return find_progress(max(log_texts, key=_find_step, default=""))


def _find_step(log_text: str) -> int:
    """Return the step of the newest progress line; 0 with only the report of a program, and -1
    without either."""
    progress_matches = PROGRESS_LINE_PATTERN.findall(log_text)
    if progress_matches:
        return int(progress_matches[-1][0])
    return 0 if LOG_LINE_PATTERN.search(log_text) else -1


def find_progress(log_text: str) -> str:
    """Return `step 120/600  loss 0.0213  10 234 samples/s  12 s left` from the newest progress line
    in a log. Without a progress line, return the newest report of a program, or ""."""
    progress_matches = PROGRESS_LINE_PATTERN.findall(log_text)
    if not progress_matches:
        program_reports = LOG_LINE_PATTERN.findall(log_text)
        return escape_control_chars(program_reports[-1]) if program_reports else ""

    step_text, total_text, loss_text, rate_text, eta_text, validation_text = progress_matches[-1]
    progress_parts = [f"step {step_text}/{total_text}", f"loss {loss_text}"]
    if validation_text:
        progress_parts[-1] += f"  validation {validation_text}"

    samples_per_second = _parse_number(rate_text)
    if samples_per_second is not None:
        progress_parts.append(f"{samples_per_second:,.0f} samples/s".replace(",", " "))
    seconds_left = _parse_number(eta_text)
    if seconds_left is not None:
        progress_parts.append(f"{format_duration(seconds_left)} left")
    return escape_control_chars("  ".join(progress_parts))


def _parse_number(number_text: str) -> float | None:
    """Parse a number that a program has written; return None if it is negative, huge or
    malformed."""
    try:
        number = float(number_text)
    except ValueError:
        return None
    return number if 0 <= number < MAX_NUMBER else None


class LogProgress(LogErrors):
    """Reads progress and errors from the logs of a step's workers (`WORKFLOW-STEP-worker*.log`, or
    `WORKFLOW-STEP-node*.log` of a TrainJob)."""

    def of(self, step: Step) -> str:
        """Return the progress of a training, or the last error of a failed step; "" if the logs
        contain neither."""
        if step.phase in FAILED_PHASES:
            return super().of(step)

        worker_logs = [
            path
            for role in WORKER_ROLES
            for path in self.logs.glob(f"{self.name}-{step.label}-{role}-*.log")
        ]
        newest_first = sorted(worker_logs, key=lambda path: path.stat().st_mtime, reverse=True)
        log_progress = choose_progress(read_end(path, LOG_END_BYTES) for path in newest_first)
        return log_progress or super().of(step)
