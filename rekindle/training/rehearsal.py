"""Rejects a workload that cannot be trained, before the workload's data is prepared.

The step `steps.rehearse` tries the workload on the first rows of its data, in a separate process
because it imports torch. A successful rehearsal is recorded in the cache folder, and is not
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
from rekindle.errors import ConfigError, write_stderr
from rekindle.step import format_flag, format_parameter

REHEARSAL_STEP = "steps.rehearse"
REHEARSAL_ROWS = 1000
# time limit of the rehearsal before a run; if the limit is exceeded, the run starts without the
# rehearsal's result
REHEARSAL_TIMEOUT_S = 30
TIMEOUT_STAGE = "timeout"
# stage of the rehearsal → exit codes of failures that a training would repeat. A failure with
# another exit code may happen only in the rehearsal, because the rehearsal reads few rows.
CERTAIN_EXIT_CODES_BY_STAGE = {
    "dataset": (exit_codes.INVALID_CONFIG,),
    **dict.fromkeys(
        ("model", "optimizer", "loss", "step", "predict", "fit"),
        (exit_codes.CODE_ERROR, exit_codes.INVALID_CONFIG),
    ),
}
# sections of a config that a training depends on
SECTION_NAMES = ("workload", "families", "data", "model", "train", "program")
ConfigSections = dict[str, Any]


def check_trainable(config_sections: ConfigSections, scheduled: str = "") -> None:
    """Raise ConfigError if a rehearsal shows that a training with this config must fail.

    `scheduled`: end of a moving data window (default: the current time).
    """
    rehearsed_sections = {
        section_name: config_sections[section_name]
        for section_name in SECTION_NAMES
        if section_name in config_sections
    }
    train_section = rehearsed_sections["train"]
    cpu_sections = rehearsed_sections | {
        "train": train_section | ({"device": "cpu"} if train_section["device"] == "auto" else {})
    }
    code_digest = code.code_identity([REHEARSAL_STEP, rehearsed_sections["workload"]])
    source_stamp = _make_source_stamp(rehearsed_sections["data"])
    rehearsal_identity = {"code": code_digest, "sections": cpu_sections, "source": source_stamp}
    success_folder = cache_folder() / "trainable"

    success_file = (
        success_folder
        / hashlib.sha256(to_json(rehearsal_identity, sort_keys=True).encode()).hexdigest()
    )
    if success_file.exists():
        return

    rehearsal_report = run_rehearsal(
        cpu_sections, timeout_s=REHEARSAL_TIMEOUT_S, scheduled=scheduled
    )
    if rehearsal_report.get("may_need_more_rows") and is_certain_failure(rehearsal_report):
        rehearsal_report = run_rehearsal(
            cpu_sections, row_count=0, timeout_s=REHEARSAL_TIMEOUT_S, scheduled=scheduled
        )

    if rehearsal_report["stage"] == TIMEOUT_STAGE:
        advice_text = "`rekindle check CONFIG` has no time limit."
        write_stderr(
            f"the workload {rehearsed_sections['workload']} was not rehearsed before the run:"
            f" {rehearsal_report['error']} {advice_text}"
        )

    if is_certain_failure(rehearsal_report):
        raise ConfigError(rehearsal_report["error"])

    if "error" not in rehearsal_report or (
        rehearsal_report["stage"] == "facts" and "unprepared" not in rehearsal_report
    ):
        success_folder.mkdir(parents=True, exist_ok=True)
        success_file.touch()


def is_certain_failure(rehearsal_report: dict[str, Any]) -> bool:
    """Return True if a training would fail with the same error as the rehearsal."""
    return rehearsal_report.get("exit_code") in CERTAIN_EXIT_CODES_BY_STAGE.get(
        rehearsal_report["stage"], ()
    )


def _make_source_stamp(data_section: dict[str, Any]) -> list[int]:
    """Return the size and the modification time of the source file; [] if the source is not a
    file."""
    source_path = Path(str(data_section["source"]))
    file_status = source_path.stat() if source_path.is_file() else None
    if file_status:
        return [file_status.st_size, file_status.st_mtime_ns]
    return []


def run_rehearsal(
    config_sections: ConfigSections,
    row_count: int = REHEARSAL_ROWS,
    is_thorough: bool = False,
    timeout_s: float | None = None,
    scheduled: str = "",
) -> dict[str, Any]:
    """Run the step `steps.rehearse` in a separate process and return its report; `row_count`,
    `is_thorough` and `scheduled` are inputs of the step."""
    step_inputs = {
        section_name: config_sections[section_name]
        for section_name in SECTION_NAMES
        if config_sections.get(section_name) is not None
    }
    step_inputs["rows"] = row_count
    step_inputs["thorough"] = is_thorough
    step_inputs["scheduled"] = scheduled
    command_flags = [
        f"{format_flag(section_name)}={format_parameter(input_value)}"
        for section_name, input_value in step_inputs.items()
    ]

    with TemporaryDirectory() as temporary_folder:
        report_path = Path(temporary_folder) / "report.json"
        command = [
            sys.executable,
            "-P",
            "-m",
            "rekindle",
            "step",
            REHEARSAL_STEP,
            *command_flags,
            "--output",
            f"report={report_path}",
        ]

        try:
            completed_process = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return {
                "stage": TIMEOUT_STAGE,
                "error": f"it took more than {timeout_s:g} s.",
                "exit_code": 1,
            }

        if report_path.exists():
            return json.loads(report_path.read_text())

    last_line = (completed_process.stderr.strip().splitlines() or ["no output"])[-1].removeprefix(
        "error: "
    )
    error_text = (
        f"the rehearsal process ended with exit code {completed_process.returncode}: {last_line}"
    )
    return {"stage": "process", "error": error_text, "exit_code": 1}
