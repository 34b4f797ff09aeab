"""Refuse a workload that cannot be trained, before its data is prepared.

The workload is tried on the first rows of its data in a separate process (`steps.rehearse`), since
this imports torch. A success is recorded in the cache folder, for the same code, settings and
source file; so is a model that cannot be built without the whole data.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argolocal.common.json_text import to_json
from rekindle.cache import code
from rekindle.cache.folder import cache_folder
from rekindle.errors import ConfigError, say
from rekindle.step import flag, to_text

STEP = "steps.rehearse"
ROWS = 1000
TIMEOUT_S = 30  # time limit of a rehearsal that a run does not depend on
TIMEOUT_STAGE = "timeout"
# stage of the check → exit codes of errors that a training would meet, too. Other stages may fail
# only because the rehearsal has few rows.
CERTAIN_ERRORS = {
    "model": (70, 78),
    "optimizer": (70, 78),
    "dataset": (78,),
    "loss": (70, 78),
    "step": (70, 78),
    "predict": (70, 78),
    "fit": (70, 78),
}
# parts of a config that a training depends on
SECTIONS = ("workload", "families", "data", "model", "train")
Sections = dict[str, Any]


def check_trainable(config: Sections, scheduled: str = "") -> None:
    """Raise ConfigError if a training with these sections certainly fails; return if it may
    succeed.

    `scheduled`: the end of a moving window (default: the current time).
    """
    sections = {name: config[name] for name in SECTIONS if name in config}
    train = sections["train"]
    cpu_sections = sections | {
        "train": train | ({"device": "cpu"} if train["device"] == "auto" else {})
    }
    code_digest = code.code_identity([STEP, sections["workload"]])
    source = _stamp(sections["data"])
    identity = {"code": code_digest, "sections": cpu_sections, "source": source}
    folder = cache_folder() / "trainable"

    success_file = folder / hashlib.sha256(to_json(identity, sort_keys=True).encode()).hexdigest()
    if success_file.exists():
        return

    report = rehearse(cpu_sections, timeout=TIMEOUT_S, scheduled=scheduled)
    if report.get("may_need_more_rows") and is_certain(report):
        report = rehearse(cpu_sections, rows=0, timeout=TIMEOUT_S, scheduled=scheduled)

    if report["stage"] == TIMEOUT_STAGE:
        advice = "`rekindle check CONFIG` has no time limit."
        say(
            f"the training of {sections['workload']} was not tried before the run:"
            f" {report['error']} {advice}"
        )

    if is_certain(report):
        raise ConfigError(report["error"])

    if "error" not in report or (report["stage"] == "facts" and "unprepared" not in report):
        folder.mkdir(parents=True, exist_ok=True)
        success_file.touch()


def is_certain(report: dict[str, Any]) -> bool:
    """Return True if a training would meet the error of a rehearsal, too."""
    return report.get("exit_code") in CERTAIN_ERRORS.get(report["stage"], ())


def _stamp(data: dict[str, Any]) -> list[int]:
    """Return the size and the modification time of a source that is a file, else an empty list."""
    path = Path(str(data["source"]))
    status = path.stat() if path.is_file() else None
    if status:
        return [status.st_size, status.st_mtime_ns]
    return []


def rehearse(
    config: Sections,
    rows: int = ROWS,
    thorough: bool = False,
    timeout: float | None = None,
    scheduled: str = "",
) -> dict[str, Any]:
    """Run the step `rehearse` in a process of its own; return its report."""
    inputs = {name: config[name] for name in SECTIONS if name in config}
    inputs["rows"] = rows
    inputs["thorough"] = thorough
    inputs["scheduled"] = scheduled
    flags = [f"{flag(name)}={to_text(value)}" for name, value in inputs.items()]

    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-P",
            "-m",
            "rekindle",
            "step",
            STEP,
            *flags,
            "--output",
            f"report={report}",
        ]

        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {
                "stage": TIMEOUT_STAGE,
                "error": f"it took more than {timeout:g} s.",
                "exit_code": 1,
            }

        if report.exists():
            return json.loads(report.read_text())

    last_line = (process.stderr.strip().splitlines() or ["no output"])[-1].removeprefix("error: ")
    error = f"the process of the check ended with exit code {process.returncode}: {last_line}"
    return {"stage": "process", "error": error, "exit_code": 1}
