"""Find the progress of a training in the logs of its workers."""

from argolocal.common.wording import format_duration, visible
from argolocal.manifest.allowed_values import FAILED
from argolocal.view.display import LogErrors
from argolocal.view.summary import Step, read_end
from rekindle.training.metrics import PROGRESS_LINE


def progress_in(log: str) -> str:
    """Return `step 120/600  loss 0.0213  10 234 samples/s  12 s left` from the newest progress in a
    log, or ""."""
    matches = PROGRESS_LINE.findall(log)
    if not matches:
        return ""

    step, total, loss, rate, eta, validation = matches[-1]
    remaining_time = format_duration(float(eta))
    losses = f"loss {loss}  validation {validation}" if validation else f"loss {loss}"
    speed = f"{float(rate):,.0f} samples/s".replace(",", " ")
    return visible(f"step {step}/{total}  {losses}  {speed}  {remaining_time} left")


class LogProgress(LogErrors):
    """Reads progress and errors from the logs of a step's workers (`WORKFLOW-STEP-worker*.log`)."""

    def of(self, row: Step) -> str:
        if row.phase in FAILED:
            return super().of(row)

        logs = self.logs.glob(f"{self.name}-{row.label}-worker*.log")
        newest_first = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
        return next(filter(None, (progress_in(read_end(path, 4096)) for path in newest_first)), "")
