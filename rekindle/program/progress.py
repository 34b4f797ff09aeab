"""The progress that a program reports while it runs: percentage, time left and metrics.

    server = ProgressServer(folder)
    server.variables()        # the environment variables of the program
    server.take()             # the newest report, once
    SavedProgress().read(checkpoint)   # for a program that sends no reports

Source: the reports are defined by Kubeflow Trainer, KEP-2779 (status of a TrainJob). The class
`Trainer` of the library transformers sends these reports by itself if the environment variables are
set. Older versions of `Trainer` send no reports, but their checkpoints contain the step in
trainer_state.json.
"""

import hmac
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from argolocal.common.environment import WHOLE_NUMBER
from argolocal.common.json_text import loads, to_json
from argolocal.common.wording import format_duration
from rekindle.program.checkpoints.formats import TRAINER_STATE_FILE
from rekindle.training.membership.protocol import MAX_STEP

MAX_BODY_BYTES = 64 << 10
MAX_METRICS = 100
REQUEST_TIMEOUT_S = 5.0
STEP_METRIC_NAMES = ("current_step", "global_step", "step")
SERVER_URL_VARIABLE = "KUBEFLOW_TRAINER_SERVER_URL"
SERVER_TOKEN_VARIABLE = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # nosec B105  # path of a file
MAX_STATE_BYTES = 64 << 20
# matches a report in the log of a pod
LOG_LINE_PATTERN = re.compile(r"^program: (.+)$", re.MULTILINE)

MetricName = Annotated[str, StringConstraints(pattern=r"^[\w./ :-]{1,200}\z")]


class ReportedMetric(BaseModel):
    """A metric of a report, whose value is a number as text."""

    name: MetricName
    value: Annotated[str, StringConstraints(max_length=64)]


class ProgressReport(BaseModel):
    """One report: completed percentage of the training, estimated seconds until its end, and
    metrics."""

    model_config = ConfigDict(populate_by_name=True, frozen=True)

    percentage: int | None = Field(None, alias="progressPercentage", ge=0, le=100)
    seconds_left: int | None = Field(None, alias="estimatedRemainingSeconds", ge=0, lt=2**40)
    reported_metrics: tuple[ReportedMetric, ...] = Field(
        (), alias="metrics", max_length=MAX_METRICS
    )

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics whose values are finite numbers, by name."""
        return {
            metric_name: metric_value
            for metric_name, metric_value in self._values.items()
            if math.isfinite(metric_value)
        }

    @property
    def not_finite(self) -> list[str]:
        """The names of the metrics that are NaN or infinite, which shows that the training
        diverges."""
        return [
            metric_name
            for metric_name, metric_value in self._values.items()
            if not math.isfinite(metric_value)
        ]

    @property
    def _values(self) -> dict[str, float]:
        values_by_name: dict[str, float] = {}
        for metric in self.reported_metrics:
            with suppress(ValueError):
                values_by_name[metric.name] = float(metric.value)
        return values_by_name

    def add_earlier_metrics(self, earlier_report: "ProgressReport") -> "ProgressReport":
        """Return this report, extended by the metrics that only `earlier_report` has."""
        reported_names = {metric.name for metric in self.reported_metrics}
        earlier_metrics = [
            metric
            for metric in earlier_report.reported_metrics
            if metric.name not in reported_names
        ]
        merged_metrics = (*self.reported_metrics, *earlier_metrics)[:MAX_METRICS]
        return self.model_copy(update={"reported_metrics": merged_metrics})

    @property
    def step(self) -> int:
        """The step in the metrics, or -1 if they contain no step that the coordinator accepts."""
        step_values = [
            self.metrics[metric_name]
            for metric_name in STEP_METRIC_NAMES
            if metric_name in self.metrics
        ]
        return max(
            (int(step_value) for step_value in step_values if 0 <= step_value <= MAX_STEP),
            default=-1,
        )

    def __str__(self) -> str:
        """Return the report as a line such as `step 120 45 % loss 0.0213 3 min 00 s left`."""
        text_parts = []
        if self.step >= 0:
            text_parts.append(f"step {self.step}")
        if self.percentage is not None:
            text_parts.append(f"{self.percentage} %")

        other_metrics = {
            metric_name: self.metrics[metric_name]
            for metric_name in self.metrics
            if metric_name not in STEP_METRIC_NAMES
        }
        text_parts += [
            f"{metric_name} {metric_value:.5g}"
            for metric_name, metric_value in other_metrics.items()
        ]
        if self.seconds_left is not None:
            text_parts.append(f"{format_duration(self.seconds_left)} left")
        return "  ".join(text_parts)

    @property
    def log_line(self) -> str:
        """The report as a log line, which LOG_LINE_PATTERN matches."""
        return f"program: {self}"


class _ReportBody(BaseModel):
    status: ProgressReport = Field(alias="trainerStatus")


def parse_report(body: bytes) -> ProgressReport:
    """Return the progress in the body of a request. Raises ValueError."""
    try:
        return _ReportBody.model_validate(loads(body)).status
    except (ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from error


class TrainerState(BaseModel):
    """The fields of transformers' trainer_state.json that describe the progress."""

    global_step: int = Field(ge=0, le=MAX_STEP)
    max_steps: int = Field(0, ge=0, le=MAX_STEP)
    log_history: list[dict[str, Any]] = []

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each logged metric."""
        newest_values = {
            metric_name: metric_value
            for log_entry in self.log_history
            for metric_name, metric_value in log_entry.items()
        }
        return {
            metric_name: metric_value
            for metric_name, metric_value in newest_values.items()
            if isinstance(metric_value, int | float)
        }


class SavedProgress:
    """The progress in the checkpoints of a Hugging Face `Trainer`."""

    def __init__(self) -> None:
        self._first_checkpoint: tuple[float, int] | None = (
            # time and step of the first checkpoint that this object has read
            None
        )

    def read(self, checkpoint_path: Path) -> ProgressReport | None:
        """Return the progress that a new checkpoint contains; None if the checkpoint is not from a
        `Trainer`."""
        try:
            with (checkpoint_path / TRAINER_STATE_FILE).open("rb") as state_file:
                # json.loads accepts NaN, which the file contains if the training has diverged
                trainer_state = TrainerState.model_validate(
                    json.loads(state_file.read(MAX_STATE_BYTES))
                )
        except (OSError, ValueError, RecursionError):
            return None

        metric_values = {"step": trainer_state.global_step, **trainer_state.metrics}
        report_fields: dict[str, Any] = {
            "metrics": [
                {"name": metric_name, "value": str(metric_value)}
                for metric_name, metric_value in metric_values.items()
            ]
        }
        if trainer_state.max_steps:
            report_fields["progressPercentage"] = min(
                100, 100 * trainer_state.global_step // trainer_state.max_steps
            )
            report_fields["estimatedRemainingSeconds"] = self._estimate_seconds_left(trainer_state)
        try:
            return ProgressReport.model_validate(report_fields)
        except ValidationError:
            return None

    def _estimate_seconds_left(self, trainer_state: TrainerState) -> int | None:
        now_s = time.monotonic()
        if self._first_checkpoint is None:
            self._first_checkpoint = now_s, trainer_state.global_step

        first_time_s, first_step = self._first_checkpoint
        completed_steps = trainer_state.global_step - first_step
        if completed_steps <= 0:
            return None
        return max(
            0,
            round(
                (now_s - first_time_s)
                / completed_steps
                * (trainer_state.max_steps - trainer_state.global_step)
            ),
        )


class ProgressServer:
    """Receives reports from the processes of this node."""

    def __init__(self, token_folder: Path) -> None:
        """`token_folder`: folder to which the file with the token of the server is written. Raises
        OSError."""
        self._token = secrets.token_urlsafe(24)
        self._token_file = token_folder / "progress.token"
        token_folder.mkdir(parents=True, exist_ok=True)
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(self._token)
        self._lock = threading.Lock()
        self._newest_report: ProgressReport | None = None
        # True once the program has sent a report
        self.has_reports = False

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="progress", daemon=True).start()

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a program finds this server."""
        server_url = f"http://127.0.0.1:{self._server.server_port}/status"
        return {SERVER_URL_VARIABLE: server_url, SERVER_TOKEN_VARIABLE: str(self._token_file)}

    def take(self) -> ProgressReport | None:
        """Return the newest report since the last call, or None. The returned report also contains
        the metrics that only earlier reports since the last call had."""
        with self._lock:
            newest_report = self._newest_report
            self._newest_report = None
        return newest_report

    def close(self) -> None:
        """Stop the server, and delete its token."""
        self._server.shutdown()
        self._server.server_close()
        self._token_file.unlink(missing_ok=True)

    def _answer(self, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of the answer to a report."""
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 401, {"error": f"send the token in the file of {SERVER_TOKEN_VARIABLE}"}

        try:
            progress_report = parse_report(body)
            with self._lock:
                self._newest_report = (
                    progress_report.add_earlier_metrics(self._newest_report)
                    if self._newest_report
                    else progress_report
                )
            self.has_reports = True
        except ValueError as error:
            return 422, {"error": str(error)}
        return 200, {}

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        answer_report = self._answer

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_POST(self) -> None:
                length_text = self.headers.get("Content-Length", "")
                if not WHOLE_NUMBER.fullmatch(length_text) or int(length_text) > MAX_BODY_BYTES:
                    http_status, answer_content = 413, {"error": f"at most {MAX_BODY_BYTES} bytes"}
                    self.close_connection = True
                else:
                    http_status, answer_content = answer_report(
                        dict(self.headers), self.rfile.read(int(length_text))
                    )

                answer_bytes = to_json(answer_content).encode()
                self.send_response(http_status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer_bytes)))
                self.end_headers()
                self.wfile.write(answer_bytes)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
