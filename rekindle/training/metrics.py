"""The progress of a training: at most one log line per second, and curves that a thread sends to
MLflow."""

import math
import re
import threading
import time
from collections.abc import Callable, Mapping

from argolocal.common.json_text import replace_nan, to_json
from rekindle.errors import TrackingError, write_stderr
from rekindle.training.ledger.argo_progress import write_progress

# maximum number of points of a curve; each point is the mean over the same number of steps
MAX_CURVE_POINTS = 500
# seconds between two requests to MLflow
UPLOAD_INTERVAL_S = 5.0
# time limit in seconds for sending the last points to MLflow
CLOSE_TIMEOUT_S = 10.0
PROGRESS_LINE_PATTERN = re.compile(
    r"progress step=(\d+)/(\d+) loss=(\S+) samples_per_s=(\S+) eta_s=(\S+)(?:"
    r" validation_loss=(\S+))?"
)


class LossCurve:
    """The exact losses of about MAX_CURVE_POINTS evenly spaced steps. Every worker records the
    losses.

    A worker that joins late or resumes from a checkpoint has only the losses of later steps.
    """

    def __init__(self, total_steps: int) -> None:
        self.interval = max(1, total_steps // MAX_CURVE_POINTS)
        self.total_steps = total_steps
        self.losses: dict[int, float] = {}

    def record(self, step: int, loss: float) -> None:
        """Record update `step`, counted from 1."""
        if step % self.interval == 0 or step in (1, self.total_steps):
            self.losses[step] = loss

    def dump(self) -> bytes:
        """Return the losses as JSON with full precision, as a list of pairs [step, loss]. A loss
        that is not finite is null."""
        return to_json(replace_nan(sorted(self.losses.items()))).encode()


class TrainingMetrics:
    """The metrics that rank 0 logs. Every worker has an instance, since any worker may become rank
    0.

    TrainingMetrics calls `record_event` once with the event `run` and the fields of `run_plan`, and
    with the event `loss` for each log line.
    """

    def __init__(
        self,
        run_id: str,
        total_steps: int,
        samples_per_step: int,
        name_prefix: str = "",
        record_event: Callable[..., None] = lambda event_name, **fields: None,
        run_plan: Mapping[str, object] | None = None,
    ) -> None:
        self.run_id = run_id
        self.total = total_steps
        self.samples_per_step = samples_per_step
        self.note = record_event
        self.plan = run_plan or {}
        self.prefix = f"{name_prefix}/" if name_prefix else ""
        self.steps_per_point = max(1, total_steps // MAX_CURVE_POINTS)
        # sums for the next point of the curves: sum of the losses, sum of the gradient norms,
        # number of steps
        self._sums = [0.0, 0.0, 0]
        self._point_start = self._line_time = time.monotonic()
        self._line_step = -1
        # the newest validation loss, or None
        self._validation_loss: float | None = None
        self._points: list[tuple[str, float, int]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._error = ""
        self._thread = threading.Thread(target=self._send_points, name="metrics", daemon=True)

    def record(self, step: int, loss: float, gradient_norm: float, learning_rate: float) -> None:
        """Record the metrics of update `step`, counted from 1."""
        self._sums[0] += loss
        self._sums[1] += gradient_norm
        self._sums[2] += 1
        now_s = time.monotonic()

        if step % self.steps_per_point == 0 or step == self.total:
            loss, gradient_norm, update_count = self._sums
            samples_per_s = (
                update_count * self.samples_per_step / max(1e-9, now_s - self._point_start)
            )

            metric_values = {
                "loss": loss / update_count,
                "gradient_norm": gradient_norm / update_count,
                "learning_rate": learning_rate,
                "samples_per_s": samples_per_s,
            }

            self._sums = [0.0, 0.0, 0]
            self._point_start = now_s
            self._queue_points("train", metric_values, step)

        # the duration of a process's first step is not measured, because it is a warm-up
        if self._line_step < 0:
            self._line_time = now_s
            self._line_step = step
            self.note("run", **self.plan)
            write_progress(step, self.total)
        elif now_s - self._line_time >= 1 or step == self.total:
            write_progress(step, self.total)
            self._log_progress(
                step, loss, (step - self._line_step) / max(1e-9, now_s - self._line_time)
            )
            self._line_time = now_s
            self._line_step = step

    def record_validation(self, step: int, validation_values: dict[str, float]) -> None:
        """Record the validation of the weights after `step` updates: the mean of the loss and of
        each measure over the held-out samples."""
        self._validation_loss = validation_values["loss"]
        self._queue_points("validation", validation_values, step)
        if step == self.total:
            write_stderr(
                "validation "
                + " ".join(
                    f"{metric_name}={metric_value:.5f}"
                    for metric_name, metric_value in validation_values.items()
                )
            )

    def _queue_points(self, curve_prefix: str, metric_values: dict[str, float], step: int) -> None:
        if self.run_id:
            with self._lock:
                self._points += [
                    (f"{self.prefix}{curve_prefix}/{metric_name}", metric_value, step)
                    for metric_name, metric_value in metric_values.items()
                ]
            if not self._thread.ident:
                self._thread.start()

    def close(self) -> None:
        """Send the remaining points to MLflow; log the number of points that were not sent in
        time."""
        self._closing.set()
        if self._thread.ident:
            self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            if self._points:
                reason = self._error or f"it did not answer within {CLOSE_TIMEOUT_S:.0f} s"
                write_stderr(
                    f"{len(self._points)} points of the curves are not in MLflow: {reason}"
                )
            self._points = []

    def _log_progress(self, step: int, loss: float, steps_per_s: float) -> None:
        eta_s = (self.total - step) / max(1e-9, steps_per_s)
        if math.isfinite(loss):
            self.note("loss", loss=loss)
        progress_line = (
            f"progress step={step}/{self.total} loss={loss:.5f}"
            f" samples_per_s={steps_per_s * self.samples_per_step:.0f}"
        )
        if self._validation_loss is None:
            validation_text = ""
        else:
            validation_text = f" validation_loss={self._validation_loss:.5f}"
        write_stderr(f"{progress_line} eta_s={eta_s:.0f}{validation_text}")

    def _send_points(self) -> None:
        from rekindle import tracking

        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(UPLOAD_INTERVAL_S)
            with self._lock:
                unsent_points = list(self._points)

            try:
                if unsent_points:
                    tracking.log_metrics(self.run_id, unsent_points)

                with self._lock:
                    del self._points[: len(unsent_points)]
            except TrackingError as error:
                self._error = str(error)
