"""The progress that a program reports while it runs: percentage, time left and metrics.

    server = ProgressServer(folder)
    server.variables()        # the environment variables of the program
    server.take()             # the newest report, once
    SavedProgress().read(checkpoint)   # for a program that sends no reports

Source: Kubeflow Trainer, KEP-2779 (status of a TrainJob). The `Trainer` of transformers sends these
reports by itself if the environment variables are set. Without them, its checkpoints have a file
with its step.
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
from rekindle.program.checkpoints.formats import TRAINER_STATE
from rekindle.training.membership.protocol import MAX_STEP

MAX_BODY_BYTES = 64 << 10
MAX_METRICS = 100
REQUEST_TIMEOUT_S = 5.0
STEP_METRICS = ("current_step", "global_step", "step")
SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
SERVER_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # nosec B105  # path of a file
MAX_STATE_BYTES = 64 << 20
LOG_LINE = re.compile(r"^program: (.+)$", re.MULTILINE)  # a report in the log of a pod

MetricName = Annotated[str, StringConstraints(pattern=r"^[\w./ :-]{1,200}\z")]


class ReportedMetric(BaseModel):
    """A metric of a report, whose value is a number as text."""

    name: MetricName
    value: Annotated[str, StringConstraints(max_length=64)]


class Progress(BaseModel):
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
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    @property
    def not_finite(self) -> list[str]:
        """The names of the metrics that are NaN or infinite, which shows that the training
        diverges."""
        return [name for name, value in self._values.items() if not math.isfinite(value)]

    @property
    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for metric in self.reported_metrics:
            with suppress(ValueError):
                values[metric.name] = float(metric.value)
        return values

    def with_metrics_of(self, earlier: "Progress") -> "Progress":
        """Return this report, extended by the metrics that only the `earlier` report has."""
        names = {metric.name for metric in self.reported_metrics}
        others = [metric for metric in earlier.reported_metrics if metric.name not in names]
        metrics = (*self.reported_metrics, *others)[:MAX_METRICS]
        return self.model_copy(update={"reported_metrics": metrics})

    @property
    def step(self) -> int:
        """The step, if the metrics contain a step that the coordinator accepts; otherwise -1."""
        values = [self.metrics[name] for name in STEP_METRICS if name in self.metrics]
        return max((int(value) for value in values if 0 <= value <= MAX_STEP), default=-1)

    def __str__(self) -> str:
        """Return `step 120  45 %  loss 0.0213  3 min 00 s left`."""
        parts = []
        if self.step >= 0:
            parts.append(f"step {self.step}")
        if self.percentage is not None:
            parts.append(f"{self.percentage} %")

        metrics = {name: self.metrics[name] for name in self.metrics if name not in STEP_METRICS}
        parts += [f"{name} {value:.5g}" for name, value in metrics.items()]
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return "  ".join(parts)

    @property
    def log_line(self) -> str:
        """The report as a log line, which LOG_LINE can parse."""
        return f"program: {self}"


class _Body(BaseModel):
    status: Progress = Field(alias="trainerStatus")


def parse_report(body: bytes) -> Progress:
    """Return the progress in the body of a request. Raises ValueError."""
    try:
        return _Body.model_validate(loads(body)).status
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
        values = {name: value for entry in self.log_history for name, value in entry.items()}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}


class SavedProgress:
    """The progress in the checkpoints of a Hugging Face `Trainer`."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # time and step of the first checkpoint

    def read(self, checkpoint: Path) -> Progress | None:
        """Return the progress that a new checkpoint contains; None if the checkpoint is not from a
        `Trainer`."""
        try:
            with (checkpoint / TRAINER_STATE).open("rb") as file:
                # json.loads accepts NaN, which the file contains if the training has diverged
                state = TrainerState.model_validate(json.loads(file.read(MAX_STATE_BYTES)))
        except (OSError, ValueError, RecursionError):
            return None

        metrics = {"step": state.global_step, **state.metrics}
        status: dict[str, Any] = {
            "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()]
        }
        if state.max_steps:
            status["progressPercentage"] = min(100, 100 * state.global_step // state.max_steps)
            status["estimatedRemainingSeconds"] = self._estimate_seconds_left(state)
        try:
            return Progress.model_validate(status)
        except ValidationError:
            return None

    def _estimate_seconds_left(self, state: TrainerState) -> int | None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, state.global_step

        first_time, first_step = self._first
        steps = state.global_step - first_step
        if steps <= 0:
            return None
        return max(0, round((now - first_time) / steps * (state.max_steps - state.global_step)))


class ProgressServer:
    """Receives reports from the processes of this node."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the file with the token of the server is written. Raises OSError."""
        self._token = secrets.token_urlsafe(24)
        self._token_file = folder / "progress.token"
        folder.mkdir(parents=True, exist_ok=True)
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(self._token)
        self._lock = threading.Lock()
        self._newest: Progress | None = None
        self.has_reports = False  # True once the program has sent a report

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="progress", daemon=True).start()

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which a program finds this server."""
        url = f"http://127.0.0.1:{self._server.server_port}/status"
        return {SERVER_URL: url, SERVER_TOKEN: str(self._token_file)}

    def take(self) -> Progress | None:
        """Return the newest report since the last call, including metrics that only earlier reports
        since then contain; None without a new report."""
        with self._lock:
            newest = self._newest
            self._newest = None
        return newest

    def close(self) -> None:
        """Stop the server, and delete its token."""
        self._server.shutdown()
        self._server.server_close()
        self._token_file.unlink(missing_ok=True)

    def _answer(self, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of the answer to a report."""
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return 401, {"error": f"send the token in the file of {SERVER_TOKEN}"}

        try:
            report = parse_report(body)
            with self._lock:
                self._newest = report.with_metrics_of(self._newest) if self._newest else report
            self.has_reports = True
        except ValueError as error:
            return 422, {"error": str(error)}
        return 200, {}

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not WHOLE_NUMBER.fullmatch(length) or int(length) > MAX_BODY_BYTES:
                    status, content = 413, {"error": f"at most {MAX_BODY_BYTES} bytes"}
                    self.close_connection = True
                else:
                    status, content = answer(dict(self.headers), self.rfile.read(int(length)))

                data = to_json(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
