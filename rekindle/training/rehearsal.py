"""Rejects a workload that cannot be trained, before its data is prepared.

The step `steps.rehearse` tries the workload on the first rows of its data, in a separate process
because it imports torch. A rehearsal that has not failed is recorded in the cache folder, and not
repeated for the same code, settings and source file.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argolocal.common import exit_codes
from argolocal.common.json_text import to_json
from rekindle.cache import code
from rekindle.cache.folder import cache_folder
from rekindle.errors import ConfigError, say
from rekindle.step import flag, to_text

REHEARSAL_STEP = "steps.rehearse"
REHEARSAL_ROWS = 1000
# time limit of the rehearsal before a run; if the limit is exceeded, the run starts without the
# rehearsal's result
TIMEOUT_S = 30
TIMEOUT_STAGE = "timeout"
# stage of the rehearsal → exit codes of failures that a training would repeat. Other failures may
# happen only in the rehearsal, because it reads few rows.
CERTAIN_EXIT_CODES = {
    "dataset": (exit_codes.INVALID_CONFIG,),
    **dict.fromkeys(
        ("model", "optimizer", "loss", "step", "predict", "fit"),
        (exit_codes.CODE_ERROR, exit_codes.INVALID_CONFIG),
    ),
}
# sections of a config that a training depends on
SECTIONS = ("workload", "families", "data", "model", "train", "program")
Sections = dict[str, Any]


def check_trainable(config: Sections, scheduled: str = "") -> None:
    """Raise ConfigError if a rehearsal shows that a training with this config must fail.

    `scheduled`: end of a moving data window (default: the current time).
    """
    sections = {name: config[name] for name in SECTIONS if name in config}
    train = sections["train"]
    cpu_sections = sections | {
        "train": train | ({"device": "cpu"} if train["device"] == "auto" else {})
    }
    code_digest = code.code_identity([REHEARSAL_STEP, sections["workload"]])
    source = _stamp_source(sections["data"])
    identity = {"code": code_digest, "sections": cpu_sections, "source": source}
    folder = cache_folder() / "trainable"

    success_file = folder / hashlib.sha256(to_json(identity, sort_keys=True).encode()).hexdigest()
    if success_file.exists():
        return

    report = rehearse(cpu_sections, timeout=TIMEOUT_S, scheduled=scheduled)
    if report.get("may_need_more_rows") and is_certain_failure(report):
        report = rehearse(cpu_sections, rows=0, timeout=TIMEOUT_S, scheduled=scheduled)

    if report["stage"] == TIMEOUT_STAGE:
        advice = "`rekindle check CONFIG` has no time limit."
        say(
            f"the workload {sections['workload']} was not rehearsed before the run:"
            f" {report['error']} {advice}"
        )

    if is_certain_failure(report):
        raise ConfigError(report["error"])

    if "error" not in report or (report["stage"] == "facts" and "unprepared" not in report):
        folder.mkdir(parents=True, exist_ok=True)
        success_file.touch()


def is_certain_failure(report: dict[str, Any]) -> bool:
    """Return True if a training would fail with the same error as the rehearsal."""
    return report.get("exit_code") in CERTAIN_EXIT_CODES.get(report["stage"], ())


def _stamp_source(data: dict[str, Any]) -> list[int]:
    """Return the size and the modification time of the source file; [] for other sources."""
    path = Path(str(data["source"]))
    status = path.stat() if path.is_file() else None
    if status:
        return [status.st_size, status.st_mtime_ns]
    return []


def rehearse(
    config: Sections,
    rows: int = REHEARSAL_ROWS,
    thorough: bool = False,
    timeout: float | None = None,
    scheduled: str = "",
) -> dict[str, Any]:
    """Run the step `steps.rehearse` in a separate process and return its report; `rows`, `thorough`
    and `scheduled` are inputs of the step."""
    inputs = {name: config[name] for name in SECTIONS if config.get(name) is not None}
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
            REHEARSAL_STEP,
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
    error = f"the rehearsal process ended with exit code {process.returncode}: {last_line}"
    return {"stage": "process", "error": error, "exit_code": 1}
